"""What a run says while it runs, and what it does not say."""

import logging
from pathlib import Path

import pytest

from tests.helpers.training import titan_config
from titan_ext.base.messages import duration
from titan_ext.config_registry import terminal
from titan_ext.config_registry.terminal import hide_noise, log_on_one_node
from titan_ext.run.trainer import extend_config


def test_duration():
    assert [duration(s) for s in (3.4, 89, 90)] == ["3 s", "89 s", "2 min"]
    assert [duration(s) for s in (3599, 7500)] == ["1 h 0 min", "2 h 5 min"]
    assert duration(273_600) == "3 d 4 h"


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


def test_one_node_logs(monkeypatch: pytest.MonkeyPatch):
    root = logging.getLogger()
    before = root.level
    try:
        for variables, level in (
            ({"GROUP_RANK": "1", "LOG_NODE": "0"}, "WARNING"),
            ({"GROUP_RANK": "1", "LOG_NODE": "1"}, "INFO"),
            ({"GROUP_RANK": "1", "LOG_NODE": "all"}, "INFO"),
            ({"LOG_NODE": "0"}, "INFO"),
            ({"GROUP_RANK": "1"}, "INFO"),
        ):
            root.setLevel("INFO")
            for name in ("GROUP_RANK", "LOG_NODE"):
                monkeypatch.delenv(name, raising=False)
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            log_on_one_node()
            assert logging.getLevelName(root.level) == level
    finally:
        root.setLevel(before)
