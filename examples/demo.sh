#!/usr/bin/env bash
# Trains the tiny GPT and the nano U-Transformer on 2 + 3 ranks of this machine, compares the first steps of each
# with one process, and sums up. PYTHON: an interpreter that has meshcast, rich and matplotlib.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-out/demo}

rm -rf "$OUT"
mkdir -p "$OUT"
export OMP_NUM_THREADS=1 # five ranks share the machine's cores
begin=$SECONDS

train() { # example, then its options
  local name=$1
  shift
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 5 \
    "examples/$name/train.py" --stages 2,3 --metrics "$OUT/$name.jsonl" "$@"
}

train gpt --model tiny --schedule 1F1B --steps 200 --eval-every 50 --verify 16
train unet --model nano --schedule Eager1F1B --steps 30 --eval-every 10 --verify 8 --profile "$OUT/unet"
"$PYTHON" -m meshcast timeline "$OUT"/unet/rank*.json -o "$OUT/unet-step.png"
for name in gpt unet; do
  "$PYTHON" examples/training/summary.py "$OUT/$name.jsonl" --plot "$OUT/$name.png"
done
echo "one training step of the U-Transformer on its five ranks, forward and backward: $OUT/unet-step.png"
echo "whole demo: $((SECONDS - begin)) s"
