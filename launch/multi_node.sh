#!/usr/bin/env bash
# One torchrun agent: run it on every node, with the same values. See docs/running.md.
#
#   CONFIG=train_configs/deepseek_v3_16b.toml NNODES=4 HEAD=node0 launch/multi_node.sh [Titan flags]
set -euo pipefail

: "${CONFIG:?a config function of TorchTitan or a TOML file}"
: "${NNODES:?how many nodes run this script}"
: "${HEAD:?the host name of the node where the agents meet; it runs this script too}"

# Without it torchrun of torch 2.15 keeps one store for all attempts: a worker of the second can read the
# address of one of the first, and fail or hang in init_process_group (docs/running.md).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchao 0.18 registers two enums in a way that torch warns of in each process.
export TORCH_LOGS=${TORCH_LOGS--torch.utils._pytree}
# The node whose workers log; from others come warnings and errors only.
export LOG_NODE=${LOG_NODE:-0}

# What no restart can mend, such as a file that is missing, is told once and not by each of MAX_RESTARTS.
"${TITAN_EXT:-titan_ext}" show "$CONFIG" "$@" >/dev/null

exec "${TORCHRUN:-torchrun}" \
    --nnodes="$NNODES" \
    --nproc_per_node="${NGPU:-gpu}" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$HEAD:${PORT:-29400}" \
    --rdzv_id="${RUN_ID:-titan_ext}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    --shutdown-timeout="${SHUTDOWN_TIMEOUT:-240}" \
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 \
    -m torchtitan.train --module titan_ext --config "$CONFIG" "$@"
