#!/usr/bin/env bash
# Trains the tiny GPT on 2 + 3 ranks of this machine, compares the first steps with one process, and sums up.
# PYTHON: an interpreter that has meshcast, rich and matplotlib.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-out/demo}

rm -rf "$OUT"
mkdir -p "$OUT"
export OMP_NUM_THREADS=1 # five ranks share the machine's cores

begin=$SECONDS
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 5 \
  examples/gpt/train.py --model tiny --stages 2,3 --schedule 1F1B --steps 200 --eval-every 50 --verify 16 \
  --metrics "$OUT/metrics.jsonl"
"$PYTHON" examples/training/summary.py "$OUT/metrics.jsonl" --plot "$OUT/loss.png"
echo "whole demo: $((SECONDS - begin)) s"
