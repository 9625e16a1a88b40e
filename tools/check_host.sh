#!/bin/bash
# Says in one sentence what a fresh machine lacks, before anything is downloaded.
set -u
python=${PYTHON:-python3}
stop() { echo "meshcast: $1" >&2; exit 1; }

command -v "$python" >/dev/null ||
  stop "no $python on PATH: install Python 3.10 or newer, or name it with make PYTHON=/path/to/python."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  stop "$("$python" --version) is too old: install Python 3.10 or newer, or name it with make PYTHON=/path/to/python."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  stop "$python cannot make virtual environments: install its venv module (on Debian: apt-get install python3-venv)."
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -e "$header" ] ||
  stop "$header is missing: install the development headers of Python (on Debian: apt-get install python3-dev)."
command -v cmake >/dev/null || stop "no cmake on PATH: install cmake 3.22 or newer (on Debian: apt-get install cmake)."
for compiler in ${CXX:-c++ g++ clang++}; do
  command -v "$compiler" >/dev/null && exit 0
done
stop "no C++ compiler on PATH: install GCC 11 or newer (on Debian: apt-get install g++), or set CXX."
