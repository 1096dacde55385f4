"""What titan_ext imports from TorchTitan is there, and a name that moves is named in one line."""

import shutil
from pathlib import Path

import torchtitan

from tests.titan_main import missing_names

_INSTALLED = Path(torchtitan.__file__).parents[1]


def test_the_installed_titan_has_every_name():
    assert missing_names(_INSTALLED) == {}


def test_a_renamed_function_is_named(tmp_path):
    copied = shutil.copytree(
        _INSTALLED / "torchtitan", tmp_path / "torchtitan", ignore=shutil.ignore_patterns("*.pyc")
    )
    moved = copied / "distributed" / "compile.py"
    moved.write_text(moved.read_text().replace("def apply_compile(", "def compile_blocks("))
    assert missing_names(tmp_path) == {
        "titan_ext/compile.py": ["torchtitan.distributed.compile.apply_compile"]
    }
