#!/bin/bash
# Fuzzes what reads input that nobody vouches for, SECONDS each: text (atheris) and the planner (libFuzzer with
# ASan and UBSan, where clang is installed).
#   fuzz.sh SECONDS [SEED [RUNS]]
# PY: interpreter with meshcast and atheris. Seed 0: a random one. RUNS: so many inputs for the planner instead of
# as many as the time allows. The same seed does not give libFuzzer the same inputs again.
set -eu
seconds=$1
seed=${2:-0}
runs=${3:-0}
py=${PY:-.venv/bin/python}
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
# Not part of the CMake build, whose compiler need not be clang.
fmt=$("$py" -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "include"))')
make -s -j"${JOBS:-2}" -f tools/fuzz.mk CXX="$clang" FMT="$fmt"
limit=(-max_total_time="$seconds")
[ "$runs" = 0 ] || limit=(-runs="$runs")
echo "fuzz: the planner, ${limit[0]#-}"
# What runs found stays for the next one, but not where a seed was asked for.
corpus=build/fuzz/corpus
[ "$seed" = 0 ] || { corpus=build/fuzz/corpus-$seed; rm -rf "$corpus"; }
mkdir -p "$corpus"
# What once broke a promise is tried first.
build/fuzz/plan_fuzz tests/fuzz/found/* >build/fuzz/plan.log 2>&1 || { tail -n 60 build/fuzz/plan.log; exit 1; }
build/fuzz/plan_fuzz "${limit[@]}" -seed="$seed" -timeout=300 -rss_limit_mb=4096 -max_len=512 \
  -artifact_prefix=build/fuzz/ "$corpus" >build/fuzz/plan.log 2>&1 || { tail -n 60 build/fuzz/plan.log; exit 1; }
grep -E "^Done" build/fuzz/plan.log
