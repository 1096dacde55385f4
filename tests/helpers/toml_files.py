"""Helpers for tests of TOML files: names of bases, loading a text, a model as comparable text."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_ext.config_registry.resolve import resolve
from titan_ext.toml.convert import Given, build, changed
from titan_ext.toml.files import KeyLocation

DEBUG = 'extends = "deepseek_v3.deepseek_v3_debugmodel"\n'
QWEN = 'extends = "qwen3.qwen3_moe_debug"\n'
DATA = "torchtitan.hf_datasets.text_datasets"

Loader = Callable[..., Any]
"""Fixture ``config``: the config of a text, beside other files by their stem."""


def model_text(config: Any) -> str:
    """The whole model config; functions in it by name, not by address."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(config.model_spec.model.to_dict()))


def filled(cls: type, table: dict[str, Any]) -> Any:
    at = KeyLocation("paint.toml")
    return build(cls, changed(cls, {}, [Given(at, table)]), at)


def resolve_text(folder: Path, text: str) -> Any:
    (folder / "run.toml").write_text(text)
    return resolve("run.toml")
