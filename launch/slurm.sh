#!/usr/bin/env bash
# A Slurm job, submitted from the root of the repository. See docs/running.md.
#
#   CONFIG=train_configs/deepseek_v3_16b.toml \
#       sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 launch/slurm.sh [Titan flags]
#
#SBATCH --job-name=titan_ext
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=USR1@300
set -euo pipefail

readonly STOPPED_EARLY=75 # what launch/slurm_node.sh ends with

: "${CONFIG:?a config function of TorchTitan or a TOML file}"
if [[ ! -f launch/slurm_node.sh ]]; then
    echo "launch/slurm_node.sh is not in $PWD: submit from the root of the repository" >&2
    exit 2
fi

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${hosts%%$'\n'*}
export CONFIG HEAD
export NNODES=$SLURM_JOB_NUM_NODES
export RUN_ID=$SLURM_JOB_ID
export PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export SHUTDOWN_TIMEOUT=${SHUTDOWN_TIMEOUT:-240}
# The seconds in --signal. Give both where the time for a save has to be longer.
readonly NOTICE=${NOTICE:-300}
if ((SHUTDOWN_TIMEOUT + 30 > NOTICE)); then
    echo "SHUTDOWN_TIMEOUT is $SHUTDOWN_TIMEOUT, but Slurm ends the job $NOTICE s after its signal: expected at most" \
        "$((NOTICE - 30)), or sbatch --signal=USR1@$((SHUTDOWN_TIMEOUT + 60)) with NOTICE=$((SHUTDOWN_TIMEOUT + 60))" >&2
    exit 2
fi
# Nodes that have saved leave it: srun tells only the highest status, and 137 of a node that was killed hides theirs.
export STOPPED_FILE=$PWD/.titan_ext-$SLURM_JOB_ID.stopped
rm -f "$STOPPED_FILE"

# A node that has saved ends before the others have: it must not take them with it.
status=0
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait="$((SHUTDOWN_TIMEOUT + 60))" \
    launch/slurm_node.sh "$@" || status=$?

if ((status == STOPPED_EARLY)) || [[ -e $STOPPED_FILE ]]; then
    rm -f "$STOPPED_FILE"
    echo "stopped before the time limit; the job is queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
