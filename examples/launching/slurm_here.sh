#!/usr/bin/env bash
# A Slurm of its own on this machine, for one command: NODES nodes, which take the command's srun.
#   slurm_here.sh NODES TASKS COMMAND [ARGUMENT ...]
# TASKS: CPUs of each node, so as many tasks. Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
# Everything is in a temporary folder and at ports from PORT (26817) on, and ends with the command.
set -eu
refuse() { echo "slurm_here.sh: $1" >&2; exit 2; }
[ $# -ge 3 ] || refuse "three arguments or more are needed: NODES TASKS COMMAND"
nodes=$1 tasks=$2
shift 2
for number in "$nodes" "$tasks"; do
  [[ $number =~ ^[1-9][0-9]?$ ]] || refuse "NODES and TASKS are numbers from 1 to 99, not '$number'"
done
PATH=$PATH:/usr/sbin
for tool in munged slurmctld slurmd srun; do
  command -v "$tool" >/dev/null || refuse "$tool is not installed: apt-get install slurmctld slurmd slurm-client munge"
done
[ "$(id -u)" = 0 ] || refuse "Slurm's daemons need root"

folder=$(mktemp -d /tmp/slurm-XXXXXX)
pids=()
finish() {
  status=$?
  trap - EXIT
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  if [ "$status" = 0 ]; then rm -rf "$folder"; else echo "slurm_here.sh: logs are in $folder" >&2; fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

port=${PORT:-26817}
host=$(hostname)
dd if=/dev/urandom of="$folder/key" bs=1024 count=1 2>/dev/null
chmod 400 "$folder/key"
chmod 755 "$folder"
mkdir "$folder/state" "$folder/spool"
cat >"$folder/slurm.conf" <<END
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
END
for ((i = 0; i < nodes; i++)); do
  echo "NodeName=node$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1 + i)) CPUs=$tasks" >>"$folder/slurm.conf"
done
echo "PartitionName=here Nodes=ALL Default=YES MaxTime=10 State=UP" >>"$folder/slurm.conf"
export SLURM_CONF=$folder/slurm.conf
export MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo  # names of the nodes lead nowhere

munged --foreground --force --socket="$folder/munge.socket" --key-file="$folder/key" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/seed" 2>"$folder/munged.err" &
pids+=($!)
for ((i = 0; i < 100; i++)); do [ -S "$folder/munge.socket" ] && break; sleep 0.1; done
slurmctld -D -c -f "$SLURM_CONF" >"$folder/slurmctld.log" 2>&1 &
pids+=($!)
for ((i = 0; i < nodes; i++)); do
  slurmd -D -N "node$i" -f "$SLURM_CONF" >"$folder/node$i.log" 2>&1 &
  pids+=($!)
done
# A node that does not come up within half a minute leaves srun waiting, which LIMIT ends.
for ((i = 0; i < 100; i++)); do
  [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = "$nodes" ] && break
  for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || { echo "slurm_here.sh: a daemon has ended" >&2; exit 1; }; done
  sleep 0.3
done
timeout "${LIMIT:-300}" "$@"
