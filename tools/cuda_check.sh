#!/bin/bash
# Builds the CUDA flavour in an environment of its own and checks what can be checked without a GPU.
#   tools/cuda_check.sh [--if-possible]
# Where it cannot be had (no nvcc, no disk, no CUDA torch) it says so in one line and fails; with --if-possible
# it succeeds then. Whatever was built must work either way. Variables:
#   PYTHON                interpreter of the environment     default python3
#   CUDA_TORCH_SPEC       torch with CUDA to install         default torch==2.11.0
#   TORCH_CUDA_ARCH_LIST  architectures                      default 9.0 (one, for speed)
#   JOBS                  parallel compiler processes        default number of cores
set -eu
cd "$(dirname "$0")/.."
if_possible=0
case ${1:-} in --if-possible) if_possible=1 ;; "") ;; *) echo "usage: tools/cuda_check.sh [--if-possible]"; exit 2 ;; esac
spec=${CUDA_TORCH_SPEC:-torch==2.11.0}
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
venv=.venv-cuda
stamp=$venv/.stamp-${spec//\//_}
build=build/cuda
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
  $venv/bin/python -m pip install -q --disable-pip-version-check "$spec" -r requirements-build.txt >build/cuda-pip.log 2>&1 ||
    cannot "pip could not install $spec: $(grep -m 1 ERROR build/cuda-pip.log || tail -n 1 build/cuda-pip.log)"
  echo "cuda-check: $spec installed in $((SECONDS - start)) s"
  touch "$stamp"
fi
py=$PWD/$venv/bin/python
torch_cuda=$($py -W ignore -c 'import torch; print(torch.version.cuda or "")')
[ -n "$torch_cuda" ] || cannot "$spec from this package index is a CPU build"

start=$SECONDS
mkdir -p $build
package=$PWD/$build/package
# A copy of the package: its own folder holds the module of the other torch.
rm -rf "$package.new" && mkdir -p "$package/meshcast" "$package.new"
(cd python && find meshcast -name '*.py' -o -name py.typed) | tar -C python -cf - -T - | tar -C "$package.new" -xf -
rm -f "$package.new/meshcast/_build_info.py"
cp -r "$package.new/." "$package/" && rm -rf "$package.new"
generator=$(command -v ninja >/dev/null && echo Ninja || echo "Unix Makefiles")
launcher=$(command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache || true)
# shellcheck disable=SC2086 # no launcher is no argument
flock build/.lock cmake -S . -B $build -G "$generator" -DPython_EXECUTABLE="$py" -DMESHCAST_CUDA=ON $launcher \
  -DMESHCAST_BUILD_TESTS=OFF -DMESHCAST_WERROR="${WERROR:-OFF}" -DMESHCAST_MODULE_DIR="$package/meshcast" \
  >build/configure-cuda.log 2>&1 || { cat build/configure-cuda.log; exit 1; }
grep -E '^-- (meshcast|CUDA)' build/configure-cuda.log
flock build/.lock cmake --build $build -j"${JOBS:-$(nproc)}" --target _C
echo "cuda-check: built in $((SECONDS - start)) s"

cd $build # away from the sources, so that the copy is what is imported
PYTHONPATH=$package "$py" -W ignore "$OLDPWD/tools/cuda_check.py"
