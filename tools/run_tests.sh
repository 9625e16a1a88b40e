#!/bin/bash
# Runs the C++ tests, then pytest, and ends with the counts of both: CTest runs both too, but prints neither's counts.
#   run_tests.sh quick|all [pytest arguments]
# Both suites always run, so that one report shows every failure; the exit status is that of the worse one.
set -u
scope=$1
shift
py=${PY:-.venv/bin/python}
status=0

# cmake/catch2.cmake: `make test` configures build/release so that Catch2 is fetched where it is missing.
if grep -q '^MESHCAST_HAS_CATCH2:INTERNAL=1' build/release/CMakeCache.txt; then
  flock build/.lock cmake --build build/release -j"${JOBS:-2}" --target meshcast_tests meshcast_simulate || status=1
  [ $status = 0 ] && { build/release/meshcast_tests | tee build/cpp_tests.log; status=${PIPESTATUS[0]}; }
  [ $status = 0 ] && { build/release/meshcast_simulate --programs 20000 --jobs "${JOBS:-2}" || status=1; }
  "$py" tests/simulation/mutants.py --check || status=1
  [ $status = 0 ] && [ "$scope" = all ] && { build/release/meshcast_tests "[slow]" || status=1; }
  cpp_result=$([ $status = 0 ] && grep -E "passed|failed|No tests ran" build/cpp_tests.log | tail -n 1 || echo "FAILED")
  # A suite without a single case would pass silently.
  case $cpp_result in *"No tests ran"*) status=1 ;; esac
elif [ "${MESHCAST_ALLOW_NO_CATCH2:-0}" = 1 ]; then
  cpp_result="NOT RUN: Catch2 is missing, allowed by MESHCAST_ALLOW_NO_CATCH2=1"
else
  cmake --build build/release --target meshcast_tests  # fails with a sentence that says what to do
  cpp_result="NOT RUN: Catch2 is missing"
  status=1
fi

# Ranks wait for each other, for limits and for deaths most of the time: three files of tests at once fit on two cores.
# A file stays whole, since its tests share the ranks that they start. Files keep the order of tests/conftest.py. `-n 0`
# runs them one after the other.
# build/tests.xml has the time of every test; tests/README.md says where it goes.
jobs=${JOBS:-2}
selection=(-n $((jobs + jobs / 2)) --dist loadfile --no-loadscope-reorder --durations=20 --junit-xml=build/tests.xml)
if [ "$scope" = quick ]; then selection+=(-m "not slow"); fi
"$py" -m pytest "${selection[@]}" "$@" || status=1
# What failed is in the log alone: the end of a long report should show it again.
[ "$cpp_result" != FAILED ] || [ ! -e build/cpp_tests.log ] || tail -n 40 build/cpp_tests.log
echo "C++ tests: $cpp_result"
exit $status
