"""A user's mistake ends a run with one message, whichever rank has it, and with no traceback."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_ext import config_registry
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base import messages as names
from titan_ext.base.messages import Mistakes, end_with_messages, in_one
from titan_ext.base.run_check import world_size
from titan_ext.config_registry.resolve import resolve


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_a_wrong_flag_has_the_words_of_titans_parser(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        resolve("deepseek_v3_debugmodel", ["--paralelism.fsdp_wrap", "block"])
    assert "--parallelism.fsdp-wrap {auto,submodule,experts,block}" in capsys.readouterr().err


def test_an_unknown_config_installs_the_hook(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ValueError, match="did you mean 'deepseek_v3_16b'"):
        _ = config_registry.deepseek_v3_15b
    assert sys.excepthook is names._end


def _shown(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, rank: int
) -> tuple[str, Any]:
    """What an uncaught error of ``run`` prints on a rank, and what is in torchrun's file."""
    others: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "four")
    monkeypatch.setattr(sys, "excepthook", lambda *error: others.append(f"hook of {error[0]}"))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"error_{rank}.json")
    end_with_messages("run.toml")
    try:
        run()
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    file = Path(f"error_{rank}.json")
    return "".join(others) or capsys.readouterr().err, (
        json.loads(file.read_text()) if file.exists() else None
    )


def test_who_prints_and_who_writes(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def mistake() -> None:
        Mistakes(["training.steps is -1."]).raise_all()

    message = "run.toml: training.steps is -1."
    for rank, printed in ((0, f"{message}\n"), (2, "")):
        shown, file = _shown(mistake, monkeypatch, capsys, rank)
        assert shown == printed
        assert file["message"]["message"] == file["message"]["extraInfo"]["py_callstack"] == message


@pytest.mark.parametrize(
    "run",
    [
        lambda: (_ for _ in ()).throw(ValueError("not ours")),
        lambda: names.in_one(cast(Any, 5)),
        lambda: world_size(SimpleNamespace(comm=SimpleNamespace(mode="default"))),
    ],
)
def test_what_is_no_mistake_keeps_its_traceback(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    shown, file = _shown(run, monkeypatch, capsys, 0)
    assert shown.startswith("hook of")
    assert file is None


def test_ten_mistakes_are_shown():
    assert in_one(["a", "a"]) == "a"
    assert in_one("abcdefghijkl").splitlines()[-1] == "  ... and 2 more"


WORKER = """
import os, sys, time
from titan_ext.base.messages import Mistakes, end_with_messages
end_with_messages("run.toml")
if os.environ["RANK"] == "1":
    Mistakes(["training.steps is -1; expected 1 or more."]).raise_all()
time.sleep(600)
"""


def test_torchrun_ends_with_the_message_of_a_rank_that_it_does_not_show():
    Path("worker.py").write_text(WORKER)
    filtered = ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3"]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0"]
    torchrun = ["torch.distributed.run", "--nproc_per_node=2", *rendezvous, *filtered]
    command = [sys.executable, "-m", *torchrun, "worker.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    *_, message, border = ended.stderr.rstrip().splitlines()
    assert message.endswith(": run.toml: training.steps is -1; expected 1 or more.")
    assert set(border) == {"="}
    assert "Traceback" not in ended.stderr.partition("ChildFailedError")[2]


def test_a_misspelt_key_of_a_config_in_python():
    config = getattr(config_registry, "moe_debug.toml")()
    config.activation_checkpoint = FP8AC.Config()
    for section, name in (
        ("parallelism", "fsdp_prefech"),
        ("debug", "record_colectives"),
        ("checkpoint", "intervall"),
        ("optimizer", "param_group"),
        ("activation_checkpoint", "presets"),
    ):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            setattr(getattr(config, section), name, None)
