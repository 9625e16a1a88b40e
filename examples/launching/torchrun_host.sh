#!/usr/bin/env bash
# What each host of a job runs: torchrun with its ranks, which meet at host 0.
#   torchrun_host.sh HOSTS INDEX FIRST_ADDRESS OWN_ADDRESS RANKS PROGRAM [ARGUMENT ...]
# HOSTS: how many; INDEX: which of them this is, from 0; RANKS: on each host. PYTHON: the interpreter.
set -eu
refuse() { echo "torchrun_host.sh: $1" >&2; exit 2; }
[ $# -ge 6 ] || refuse "six arguments or more are needed: HOSTS INDEX FIRST_ADDRESS OWN_ADDRESS RANKS PROGRAM"
hosts=$1 index=$2 first=$3 own=$4 ranks=$5
shift 5
for number in "$hosts" "$index" "$ranks"; do
  [[ $number =~ ^[0-9]{1,6}$ ]] || refuse "HOSTS, INDEX and RANKS are numbers, not '$number'"
done
[ "$ranks" -ge 1 ] || refuse "RANKS is at least 1"
[ "$index" -lt "$hosts" ] || refuse "INDEX $index: of $hosts hosts, numbers begin with 0"
[ -f "$1" ] || refuse "there is no program $1"

# is_host: torchrun finds out by the host's name whether it is host 0, and a name that leads to 127.0.0.1 misleads it.
# read_timeout: a host that is up before host 0 tries to reach it for so long, and once more.
# local-addr: what the ranks of other hosts are told as MASTER_ADDR, which else is that name.
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "$hosts" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-id "${JOB:-job}" --rdzv-endpoint "$first:${PORT:-29400}" \
  --rdzv-conf "is_host=$((index == 0)),join_timeout=${JOIN:-120},read_timeout=${JOIN:-120}" --local-addr "$own" "$@"
