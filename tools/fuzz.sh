#!/bin/bash
# Fuzzes what reads input that no one has checked, SECONDS each: no runner does so for atheris and for libFuzzer.
# Text (atheris), and the planner (libFuzzer with ASan and UBSan, where clang is installed).
#   fuzz.sh SECONDS [SEED [RUNS]]
# PY: interpreter with meshcast and atheris. Seed 0: a random one. RUNS: so many inputs for the planner instead of
# as many as the time allows. The same seed does not give libFuzzer the same inputs again.
set -eu
seconds=$1
seed=${2:-0}
runs=${3:-0}
py=${PY:-$PWD/.venv/bin/python}
mkdir -p build/fuzz

echo "fuzz: layouts, topologies and plans as text, $seconds s"
PYTHONPATH=python "$py" tests/fuzz/text_fuzz.py -max_total_time="$seconds" -seed="$seed" -artifact_prefix=build/fuzz/ \
  >build/fuzz/text.log 2>&1 ||
  { tail -n 60 build/fuzz/text.log; exit 1; }
grep -E "^Done|^stat::" build/fuzz/text.log || tail -n 1 build/fuzz/text.log

clang=${FUZZ_CXX:-$(command -v clang++ || true)}
if [ -z "$clang" ] || ! echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
  "$clang" -x c++ -fsanitize=fuzzer,address,undefined - -o build/fuzz/probe 2>/dev/null; then
  echo "fuzz: the planner NOT RUN: no clang++ with libFuzzer (on Debian: apt-get install clang)"
  exit 0
fi
{ cmake --preset fuzz -DCMAKE_CXX_COMPILER="$clang" -DPython_EXECUTABLE="$py" &&
  cmake --build build/fuzz/cmake -j"${JOBS:-2}" --target plan_fuzz; } >build/fuzz/build.log 2>&1 ||
  { tail -n 60 build/fuzz/build.log; exit 1; }
plan_fuzz=build/fuzz/cmake/plan_fuzz
limit=(-max_total_time="$seconds")
[ "$runs" = 0 ] || limit=(-runs="$runs")
echo "fuzz: the planner, ${limit[0]#-}"
# What runs found stays for the next one, but not where a seed was asked for.
corpus=build/fuzz/corpus
[ "$seed" = 0 ] || { corpus=build/fuzz/corpus-$seed; rm -rf "$corpus"; }
mkdir -p "$corpus"
# What once broke a promise is tried first.
$plan_fuzz tests/fuzz/found/* >build/fuzz/plan.log 2>&1 || { tail -n 60 build/fuzz/plan.log; exit 1; }
$plan_fuzz "${limit[@]}" -seed="$seed" -timeout=300 -rss_limit_mb=4096 -max_len=512 \
  -artifact_prefix=build/fuzz/ "$corpus" >build/fuzz/plan.log 2>&1 || { tail -n 60 build/fuzz/plan.log; exit 1; }
grep -E "^Done" build/fuzz/plan.log
