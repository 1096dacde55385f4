# SPDX-License-Identifier: BSD-3-Clause
"""Reads a run's folder: how far the run came, and its loss, with a picture.

Reads what Titan wrote (checkpoints, TensorBoard files); writes ``loss.png``. launch/train.sh calls
it before a run, for the step at which that ends, and after it.
"""

import contextlib
import json
import re
import sys
from pathlib import Path

LOSS = "loss_metrics/global_avg_loss"
RECORD = "run.json"
"""File of ``run.record``, with an entry for each start of the run."""


def whole_checkpoint_steps(checkpoints: Path, *, marker: str = ".metadata") -> list[int]:
    """The steps of the whole checkpoints in a folder of them, oldest first.

    A checkpoint is whole if it has its ``.metadata``, which is written last: the rule by which
    Titan's checkpointer finds what to resume from (torchtitan/components/checkpointer/dcp.py).
    An export has another ``marker``. With ``marker=""`` those that are not whole count, too.
    """
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in checkpoints.glob("step-*"))
    return sorted(
        int(name[1]) for name in names if name and (checkpoints / name[0] / marker).exists()
    )


def latest_checkpoint_step(folder: Path) -> int:
    """The step of the newest whole checkpoint of a run, 0 if there is none."""
    return max(whole_checkpoint_steps(folder / "checkpoint"), default=0)


def next_target(folder: Path, steps: int) -> int:
    """The step at which the next run ends: the first multiple of ``steps`` not reached yet.

    A finished run goes on for ``steps`` more; an interrupted one ends where it would have ended.
    """
    return (latest_checkpoint_step(folder) // steps + 1) * steps


def read_scalar(folder: Path, tag: str) -> dict[int, float]:
    """A scalar by step from every TensorBoard file of the folder; where runs overlap, the later.

    Values are float32, as TensorBoard keeps them. Raises ValueError if there is none of that tag.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    by_step: dict[int, tuple[float, float]] = {}
    for event_file in sorted(folder.glob("tb/**/events.*")):
        # 0: keep every event, not a sample of 10,000
        events = EventAccumulator(str(event_file), size_guidance={"scalars": 0}).Reload()
        with contextlib.suppress(KeyError):  # a run that ended before its first step
            for event in events.Scalars(tag):
                if event.wall_time >= by_step.get(event.step, (0.0, 0.0))[0]:
                    by_step[event.step] = (event.wall_time, event.value)
    if not by_step:
        raise ValueError(f"{folder}: no TensorBoard file with {tag} under tb/.")
    return {step: by_step[step][1] for step in sorted(by_step)}


def report(folder: Path) -> str:
    """Write ``loss.png`` into the folder and return one line about the run."""
    losses = read_scalar(folder, LOSS)
    picture = folder / "loss.png"
    _draw(losses, picture)
    first, last = min(losses), max(losses)
    step = latest_checkpoint_step(folder)
    saved = f"checkpoint {folder / 'checkpoint'}/step-{step}" if step else "no checkpoint"
    return (
        f"loss {losses[first]:.3f} at step {first} -> {losses[last]:.3f} at step {last}; "
        f"{picture}, TensorBoard {folder / 'tb'}, {saved}"
    )


def ending(folder: Path, target: int) -> str:
    """The last line about a run, finished or stopped by a signal: what to do next."""
    last = json.loads((folder / RECORD).read_text())["starts"][-1]
    is_saved = latest_checkpoint_step(folder) == last["step"]
    more = "the same command trains on from there" if is_saved else "this step was not saved"
    return f"{last['ending']} at step {last['step']} of {target}; {more}"


def _draw(losses: dict[int, float], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(losses), list(losses.values()), marker="." if len(losses) <= 100 else "")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=picture.parent.name)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def main() -> None:
    """``target FOLDER STEPS`` prints ``next_target``; ``report FOLDER TARGET`` what the run did."""
    command, folder, number = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if not number.isdecimal() or int(number) < 1:
        sys.exit(f"STEPS is {number}; expected 1 or more.")
    if command == "target":
        print(next_target(folder, int(number)))
        return
    for line_of in (lambda: report(folder), lambda: ending(folder, int(number))):
        try:
            if line := line_of():
                print(line)
        except (OSError, ValueError) as error:  # the run itself was good
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
