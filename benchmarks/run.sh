#!/usr/bin/env bash
# Measures on an emulated cluster of this machine (root, iproute2) and publishes. PYTHON: interpreter with meshcast.
#   run.sh paper [options of `python -m benchmarks reshard`]    the paper's sixteen cases
#   run.sh all                                                  every case there is
#   run.sh NAME [options]                                       another benchmark
# What fails does not keep the rest from being measured and published; the exit status tells.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" -eq 0 ] && ! command -v tc >/dev/null; then apt-get install -y -qq iproute2 >/dev/null; fi
python=${PYTHON:-python3}
export PYTHONPATH=python:.
results=benchmarks/results
what=${1:-paper}
[ $# -gt 0 ] && shift
status=0
case $what in paper | all) ;; *) exec "$python" -m benchmarks "$what" "$@" ;; esac

measure() {  # FILE CASES [options]
  local file=$1 cases=$2
  shift 2
  "$python" -m benchmarks reshard --cases "$cases" --out "$results/$file.json" "$@" || status=1
}

# The machine rests first: what a build left to write, and processes that end, show in the calibration.
sync
sleep 2
measure paper_cases n-to-m,1-to-m "$@"
if [ "$what" = all ]; then
  ours=auto,multicast,broadcast
  plans="Megatron plan,NeMo-RL plan,M2N plan"
  measure random_layouts random --methods "$ours,$plans,gloo unicasts,Open MPI pipeline"
  measure other_cases odd,partial,nics,unequal,state-dict,small,backend,in-host --methods \
    "$ours,$plans,backend broadcast,gloo unicasts,gloo gather+broadcast,DTensor parent mesh,Open MPI pipeline,ScaLAPACK gemr2d"
  measure scaling hosts,ranks,sizes --methods "$ours,gloo unicasts,Open MPI pipeline"
fi
"$python" -m benchmarks planner --out "$results/planner.json" || status=1
"$python" -m benchmarks publish || status=1
exit $status
