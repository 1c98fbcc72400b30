#!/bin/bash
# A Slurm cluster of two nodes on this machine: cluster.sh FOLDER; SLURM_CONF=FOLDER/slurm.conf is how others find it.
# It is gone with its four daemons, whose ids are in FOLDER/*.pid. As root; needs Debian's slurmctld, slurmd, slurm-client
# and munge.
set -euo pipefail
folder=$(realpath "$1")
mkdir -p "$folder/state"
chmod 755 "$folder"
cat > "$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$(hostname)
SlurmUser=root
SlurmctldPort=27817
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=10
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=one NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=27818 CPUs=2
NodeName=two NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=27819 CPUs=2
PartitionName=low Nodes=one,two Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes=one,two PriorityTier=10 PreemptMode=OFF
END
(umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
export SLURM_CONF=$folder/slurm.conf
slurmctld -c
slurmd -N one
slurmd -N two
