#!/usr/bin/env bash
# What meshcast does, on ranks of this machine: one tensor moved by it and by other means, the plan of a transfer
# between hosts, and a GPT trained over two meshes beside one process. --long trains longer, and a U-Transformer too.
# PYTHON: an interpreter that has meshcast, rich and matplotlib (--long: scikit-learn as well).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-out/demo}
LONG=
[ "${1:-}" = --long ] && LONG=yes

rm -rf "$OUT"
mkdir -p "$OUT"
export OMP_NUM_THREADS=1 # five ranks share the machine's cores
begin=$SECONDS

say() { printf '\n%s\n' "$*"; }

ranks() { # a program for five ranks, and its options
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 5 "$@"
}

train() { # example, then its options
  local name=$1
  shift
  ranks "examples/$name/train.py" --stages 2,3 --metrics "$OUT/$name.jsonl" "$@"
  "$PYTHON" examples/training/summary.py "$OUT/$name.jsonl" --plot "$OUT/$name.png"
}

say "1 of 3: the same tensor, moved by meshcast and by what scripts do today (five ranks start)"
ranks examples/compared.py

say "2 of 3: the plan where six ranks of two other hosts need copies, 10 Gbit/s a host, nothing is sent"
transfer=(--shape 4096,4096 --dtype float32 --src '2:Shard(0)' --dst '6@3:Replicate()' --ranks-per-host 3)
"$PYTHON" -m meshcast plan "${transfer[@]}" --compare
"$PYTHON" -m meshcast plan "${transfer[@]}" --draw "$OUT/plan.png" >/dev/null

say "3 of 3: a GPT, its first stage on two ranks and its second on three, each step beside one process"
if [ -n "$LONG" ]; then
  train gpt --model tiny --schedule 1F1B --steps 200 --eval-every 50 --verify 16
  say "and a U-Transformer on scikit-learn's digits"
  train unet --model nano --schedule Eager1F1B --steps 30 --eval-every 10 --verify 8 --profile "$OUT/unet"
  "$PYTHON" -m meshcast timeline "$OUT"/unet/rank*.json -o "$OUT/unet-step.png"
else
  train gpt --model tiny --schedule 1F1B --steps 40 --eval-every 20 --verify 8
fi

say "Pictures, after $((SECONDS - begin)) s in all:"
printf '  %-22s %s\n' "$OUT/plan.png" "the plan: what each host sends and receives, over time" \
  "$OUT/gpt.png" "loss over two meshes and in one process"
if [ -n "$LONG" ]; then
  printf '  %-22s %s\n' "$OUT/unet.png" "the same of the U-Transformer" \
    "$OUT/unet-step.png" "one of its steps on five ranks, forward and backward"
fi
