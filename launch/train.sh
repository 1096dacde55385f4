#!/bin/sh
# Train on NGPU processes of this machine, for another STEPS in RUN_FOLDER. A signal ends the run after a step, saved.
#
#   CONFIG=train_configs/moe_debug.toml RUN_FOLDER=outputs/moe_debug STEPS=30 NGPU=4 launch/train.sh [Titan flags]
#
# torchrun passes a signal on to its workers and then fails, with a traceback and 1, however well they end. So it has
# a session of its own, which no Ctrl-C reaches. Only the workers are asked: they save and end with 0
# (titan_ext/run/stop.py), and torchrun ends as they do.
set -eu

python=${PYTHON:-python}
target=$("$python" -m titan_ext.base.run_folder target "$RUN_FOLDER" "$STEPS")
# A mistake in a file or a flag is told once, without torchrun's traceback.
"$python" -m titan_ext show "$CONFIG" "$@" >/dev/null

# setsid and setpriv are util-linux's. By the latter, where this shell is killed, torchrun ends with it, and the workers with torchrun.
setsid setpriv --pdeathsig KILL "$python" -m torch.distributed.run \
    --nproc_per_node="$NGPU" --rdzv_backend c10d --rdzv_endpoint=localhost:0 --shutdown-timeout=600 \
    --local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train --module titan_ext --config "$CONFIG" \
    --dump_folder "$RUN_FOLDER" --training.steps "$target" "$@" &
torchrun=$!

signal() { # its name, and the files that /proc has for processes; one that has ended is no error
    # shellcheck disable=SC2046 # a word for each process
    kill -s "$1" $(echo "$2" | tr -cs 0-9 ' ') 2>/dev/null || true
}

interrupted=""
trap 'interrupted=1' INT TERM HUP QUIT
code=0
wait "$torchrun" || code=$?
asked=""
while [ -n "$interrupted" ] && [ "$code" -gt 128 ]; do # a signal ended the wait, not torchrun
    # One request can be several signals: timeout signals make and its group, and make passes SIGTERM on.
    trap '' INT TERM HUP QUIT
    workers=$(grep -ls "^PPid:.$torchrun\$" /proc/[0-9]*/status || true)
    # Bit 14 of SigCgt: a handler of SIGTERM, which workers have while they train.
    # shellcheck disable=SC2086 # a word for each worker
    listening=$(grep -ls '^SigCgt:.*[4-7c-f]...$' /dev/null $workers || true)
    if [ -n "$asked" ] || [ -z "$listening" ]; then
        signal STOP "$torchrun" # so that it starts no worker meanwhile
        signal KILL "$workers $torchrun"
        echo "stopped at once; what was not saved is lost" >&2
        exit 130
    fi
    asked=1
    signal TERM "$listening" # not INT, which a process that a shell starts with & ignores
    sleep 1
    trap 'interrupted=1' INT TERM HUP QUIT
    interrupted=""
    code=0
    wait "$torchrun" || code=$?
done
[ "$code" -eq 0 ] || exit "$code"
trap - INT TERM HUP QUIT
exec "$python" -m titan_ext.base.run_folder report "$RUN_FOLDER" "$target"
