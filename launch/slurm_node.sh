#!/usr/bin/env bash
# What launch/slurm.sh runs on each node: the agent, and Slurm's early signal made a SIGTERM.
#
# Slurm signals every process of a step. A SIGTERM would reach each worker twice, from Slurm and
# from its torchrun, and the second one ends it unsaved. So the early signal is SIGUSR1, which all
# ignore but this shell: torchrun gets one SIGTERM from here, each worker one from torchrun.
#
# Ends with 75 if the signal ended the run, and as torchrun does otherwise.
set -euo pipefail

agent=""
asked=0
trap 'asked=1; trap "" USR1; [[ -z $agent ]] || kill -TERM "$agent" || true' USR1

(
    trap '' USR1 # inherited by torchrun and its workers
    exec "$(dirname "${BASH_SOURCE[0]}")/multi_node.sh" "$@"
) &
agent=$!

status=0
wait "$agent" || status=$?
if ((asked)); then # the signal ended the wait, not the agent
    status=0
    wait "$agent" || status=$?
fi
if ((asked && status != 0)); then
    exit 75
fi
exit "$status"
