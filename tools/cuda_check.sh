#!/bin/bash
# Makes an environment with CUDA's torch, and there runs the steps of tools/on_gpu.sh as far as they go without a GPU.
#   tools/cuda_check.sh [--if-possible]
# Where it cannot be had (no nvcc, no disk, no CUDA torch) it says so in one line and fails; with --if-possible
# it succeeds then. Whatever was built must work either way. Variables:
#   PYTHON                interpreter of the environment     default python3
#   CUDA_TORCH_SPEC       torch with CUDA to install         default torch==2.15.0, for `make test-newest` too
#   TORCH_CUDA_ARCH_LIST  architectures                      default 9.0 (one, for speed)
#   JOBS                  parallel compiler processes        default number of cores
set -eu
cd "$(dirname "$0")/.."
if_possible=0
case ${1:-} in --if-possible) if_possible=1 ;; "") ;; *) echo "usage: tools/cuda_check.sh [--if-possible]"; exit 2 ;; esac
spec=${CUDA_TORCH_SPEC:-torch==2.15.0}
venv=.venv-cuda
stamp=$venv/.stamp-${spec//\//_}
need_gib=20

cannot() {
  echo "cuda-check: NOT CHECKED: $1"
  [ $if_possible = 1 ] && exit 0
  exit 1
}

command -v nvcc >/dev/null || [ -n "${CUDACXX:-}${CUDA_HOME:-}" ] || cannot "no nvcc on PATH, and neither CUDACXX nor CUDA_HOME is set"

if [ ! -e "$stamp" ]; then
  free=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
  [ "$free" -ge $need_gib ] || cannot "$free GiB of disk are free, $spec with CUDA needs $need_gib"
  start=$SECONDS
  rm -rf $venv
  "${PYTHON:-python3}" -m venv $venv
  mkdir -p build
  # A constraint that a machine sets for its users is not meant here: this release is asked for by name.
  PIP_CONSTRAINT=/dev/null $venv/bin/python -m pip install -q --disable-pip-version-check "$spec" -r requirements-build.txt -r requirements-dev.txt \
    >build/cuda-pip.log 2>&1 ||
    cannot "pip could not install $spec: $(grep -m 1 ERROR build/cuda-pip.log || tail -n 1 build/cuda-pip.log)"
  echo "cuda-check: $spec installed in $((SECONDS - start)) s"
  touch "$stamp"
fi
torch_cuda=$($venv/bin/python -W ignore -c 'import torch; print(torch.version.cuda or "")')
[ -n "$torch_cuda" ] || cannot "$spec from this package index is a CPU build"
MESHCAST_CUDA=ON PYTHON=$PWD/$venv/bin/python tools/on_gpu.sh --dry
