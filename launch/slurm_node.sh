#!/usr/bin/env bash
# What launch/slurm.sh runs on each node: the agent, and Slurm's early signal made a SIGTERM.
#
# Slurm signals every process of a step, and a torchrun that gets SIGTERM twice sends it on twice.
# So the early signal is SIGUSR1, which all ignore but this shell: torchrun gets one SIGTERM from
# here, each worker one from torchrun. Slurm's own SIGTERM, which all get, this shell outlives: when
# a task has ended Slurm kills what is left of it.
#
# Ends with 75 if the early signal ended the run, and as torchrun does otherwise.
set -euo pipefail

agent=""
asked=0
interrupted=0
trap 'asked=1; interrupted=1; trap "" USR1; [[ -z $agent ]] || kill -TERM "$agent" || true' USR1
trap 'interrupted=1' TERM

(
    trap '' USR1 # inherited by torchrun and its workers
    exec "$(dirname "${BASH_SOURCE[0]}")/multi_node.sh" "$@"
) &
agent=$!

status=0
wait "$agent" || status=$?
while ((interrupted)); do # a signal ended the wait, not the agent
    interrupted=0
    status=0
    wait "$agent" || status=$?
done
if ((asked && status != 0)); then
    touch "${STOPPED_FILE:-/dev/null}" # for slurm.sh, where another node ends with a higher status
    exit 75
fi
exit "$status"
