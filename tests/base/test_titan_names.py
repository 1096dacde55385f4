"""What titan_ext takes from TorchTitan and torch is listed, and a name that moves is named."""

import shutil
from pathlib import Path

import torchtitan

from tests.titan_main import missing_names, used_names

_INSTALLED = Path(torchtitan.__file__).parents[1]
_LIST = Path(__file__).with_name("titan_names.txt")
_SEAM = "titan_ext/base/titan/"


def test_every_name_is_listed_and_what_only_one_side_has_is_in_the_seam():
    """``python -m tests.titan_main --names`` prints where each is used.

    A new name of TorchTitan goes into the first part if main has it too, else into the second.
    """
    both, seam, torch = (part.splitlines()[1:] for part in _LIST.read_text().split("\n\n"))
    used = used_names()
    assert sorted([*both, *seam, *torch]) == sorted(used)
    assert not [name for name in seam if not all(file.startswith(_SEAM) for file in used[name])]
    assert not [name for name in both if name.startswith("torch.")]
    assert not [name for name in torch if name.startswith("torchtitan.")]


def test_the_installed_titan_has_every_name():
    assert missing_names(_INSTALLED) == {}


def test_a_renamed_function_is_named(tmp_path):
    copied = shutil.copytree(
        _INSTALLED / "torchtitan", tmp_path / "torchtitan", ignore=shutil.ignore_patterns("*.pyc")
    )
    moved = copied / "distributed" / "compile.py"
    moved.write_text(moved.read_text().replace("def apply_compile(", "def compile_blocks("))
    assert missing_names(tmp_path) == {
        "titan_ext/activation_checkpoint/compile.py": [
            "torchtitan.distributed.compile.apply_compile"
        ]
    }
