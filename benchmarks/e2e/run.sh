#!/usr/bin/env bash
# The paper's jobs end to end on an emulated cluster of this machine (root, iproute2). PYTHON: interpreter with
# what `make demo` needs.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "$(id -u)" -eq 0 ] && ! command -v tc >/dev/null; then apt-get install -y -qq iproute2 >/dev/null; fi
PYTHONPATH=python:.:examples exec "${PYTHON:-python3}" -m benchmarks.e2e "$@"
