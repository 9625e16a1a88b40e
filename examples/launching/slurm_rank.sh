#!/usr/bin/env bash
# What srun starts for each task: it gives the program the variables that torch reads.
#   srun --nodes 3 --ntasks-per-node 2 examples/launching/slurm_rank.sh PROGRAM [ARGUMENT ...]
# PORT: where the ranks meet on the first node; by default one that follows from the job's number.
set -eu
refuse() { echo "slurm_rank.sh: $1" >&2; exit 2; }
[ $# -ge 1 ] || refuse "a program is needed"
[ -n "${SLURM_PROCID:-}" ] || refuse "SLURM_PROCID is not set: start this by srun"
[ -f "$1" ] || refuse "there is no program $1"
if [ -z "${MASTER_ADDR:-}" ]; then
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
fi
export MASTER_ADDR MASTER_PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
# Ranks of a node are on one host, also where several nodes are one machine.
export MESHCAST_HOST_ID=${MESHCAST_HOST_ID:-$SLURMD_NODENAME}
exec "${PYTHON:-python3}" "$@"
