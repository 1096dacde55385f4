import json
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from titan_ext.base import run_folder
from titan_ext.base.run_folder import (
    LOSS,
    RECORD,
    latest_checkpoint_step,
    main,
    next_target,
    read_scalar,
    report,
)


def _checkpoint(folder: Path, step: int, whole: bool = True) -> None:
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    if whole:
        (path / ".metadata").touch()


def _log(folder: Path, name: str, losses: dict[int, float], wall_time: float) -> None:
    with SummaryWriter(str(folder / "tb" / name)) as writer:
        for step, loss in losses.items():
            writer.add_scalar(LOSS, loss, step, walltime=wall_time)


def test_the_next_target_follows_the_newest_whole_checkpoint(tmp_path: Path):
    assert (latest_checkpoint_step(tmp_path), next_target(tmp_path, 30)) == (0, 30)
    for reached, target in ((9, 30), (29, 30), (30, 60)):
        _checkpoint(tmp_path, reached)
        _checkpoint(tmp_path, reached + 60, whole=False)
        assert latest_checkpoint_step(tmp_path) == reached
        assert next_target(tmp_path, 30) == target


def test_a_resumed_run_overwrites_what_it_repeats(tmp_path: Path):
    _log(tmp_path, "b_first", {1: 8.0, 2: 7.0, 3: 99.0}, wall_time=1.0)
    _log(tmp_path, "a_second", {3: 6.0, 4: 5.0}, wall_time=2.0)
    assert read_scalar(tmp_path, LOSS) == {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0}


def test_report_is_one_line_with_the_picture(tmp_path: Path):
    with pytest.raises(ValueError, match="no TensorBoard file"):
        report(tmp_path)
    _log(tmp_path, "run", {1: 8.0, 2: 7.5}, wall_time=1.0)
    assert report(tmp_path).endswith("no checkpoint")
    _checkpoint(tmp_path, 2)
    line = report(tmp_path)
    assert "\n" not in line
    assert "loss 8.000 at step 1 -> 7.500 at step 2" in line
    assert line.endswith("step-2")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ending", "saved", "line"),
    [
        ("finished", 27, "finished at step 27 of 30; the same command trains on from there"),
        ("stopped", 27, "stopped at step 27 of 30; the same command trains on from there"),
        ("stopped", 20, "stopped at step 27 of 30; this step was not saved"),
    ],
)
def test_the_last_line_says_how_a_run_ended_and_what_is_next(
    ending: str, saved: int, line: str, tmp_path: Path
):
    _checkpoint(tmp_path, saved)
    starts = [{"ending": "stopped", "step": 3}, {"ending": ending, "step": 27}]
    (tmp_path / RECORD).write_text(json.dumps({"starts": starts}))
    assert run_folder.ending(tmp_path, 30) == line


@pytest.mark.parametrize("steps", ["0", "many"])
def test_steps_that_no_run_has(steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["run_folder", "target", str(tmp_path), steps])
    with pytest.raises(SystemExit, match=f"STEPS is {steps}; expected 1 or more"):
        main()
