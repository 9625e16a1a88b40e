#!/bin/bash
# Builds, tests and measures everything that was written for GPUs, with a Python that no tool has prepared.
#   tools/on_gpu.sh [--dry] [--from STEP] [--only STEP ...] [--within SECONDS] [--out FILE.json]      (--help: all)
# It needs a python3 whose torch has CUDA, nvcc, cmake and pytest, and no network. --dry runs every step as far as it
# goes without a GPU; where python3 has no torch, in the environment of `make test`, which it makes if need be.
#   PYTHON   interpreter   default python3
set -eu
cd "$(dirname "$0")/.."
dry=0
for word in "$@"; do [ "$word" != --dry ] || dry=1; done
has_torch() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; }
py=${PYTHON:-python3}
if [ $dry = 1 ] && [ -z "${PYTHON:-}" ] && ! has_torch python3; then
  py=$PWD/.venv/bin/python
  [ -e .venv/.stamp-dev ] && has_torch "$py" || make -s .venv/.stamp-dev
fi
exec "$py" tools/on_gpu.py "$@"
