#!/usr/bin/env bash
# Pipeline schedules on an emulated cluster of this machine (root, iproute2). PYTHON: interpreter with meshcast.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "$(id -u)" -eq 0 ] && ! command -v tc >/dev/null; then apt-get install -y -qq iproute2 >/dev/null; fi
PYTHONPATH=python:. exec "${PYTHON:-python3}" -m benchmarks.pipeline "$@"
