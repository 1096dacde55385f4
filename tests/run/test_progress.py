"""What a run says while it runs, and what it does not say."""

import logging
from pathlib import Path

import pytest

from tests.helpers.training import titan_config
from titan_ext.base.messages import duration
from titan_ext.config_registry import terminal
from titan_ext.config_registry.terminal import hide_noise, log_on_one_node
from titan_ext.run.trainer import extend_config


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (3.4, "3 s"),
        (89, "89 s"),
        (90, "2 min"),
        (3599, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_duration(seconds: float, said: str):
    assert duration(seconds) == said


def test_defaults_are_not_warned_of(caplog: pytest.LogCaptureFixture):
    hide_noise()
    config = extend_config(titan_config("qwen3"))
    config.checkpoint.__post_init__()
    assert "initial_load_model_only" not in caplog.text
    logging.warning("another")
    assert "another" in caplog.text


def test_commands_show_our_own_lines_alone():
    """In a checkout that is called titan_ext, too, with other packages in its .venv."""
    package = Path(terminal.__file__).parents[1]
    others = Path("/srv/titan_ext/.venv/torchtitan/trainer.py")
    for path, ours in ((package / "run/budget.py", True), (others, False)):
        record = logging.makeLogRecord({"pathname": str(path)})
        assert terminal._is_ours(record) is ours


@pytest.mark.parametrize(
    ("node", "wanted", "level"),
    [
        ("0", "0", "INFO"),
        ("1", "0", "WARNING"),
        ("1", "1", "INFO"),
        ("1", "all", "INFO"),
        (None, "0", "INFO"),
        ("1", None, "INFO"),
    ],
)
def test_one_node_logs(node, wanted, level: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("GROUP_RANK", node), ("LOG_NODE", wanted)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    root = logging.getLogger()
    before = root.level
    root.setLevel("INFO")
    try:
        log_on_one_node()
        assert logging.getLevelName(root.level) == level
    finally:
        root.setLevel(before)
