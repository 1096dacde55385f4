"""What titan_ext takes from TorchTitan and torch is listed, and a name that moves is named."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import torchtitan
from torchtitan.config import ParallelismConfig, TrainingConfig

from tests.titan_main import missing_names, used_names
from titan_ext.base.titan import tokens_of_microbatch

_INSTALLED = Path(torchtitan.__file__).parents[1]
_LIST = Path(__file__).with_name("titan_names.txt")
_SEAM = "titan_ext/base/titan.py"


def test_every_name_is_listed_and_what_only_one_side_has_is_in_the_seam():
    """``python -m tests.titan_main --names`` prints where each is used.

    A new name of TorchTitan goes into the first part if main has it too, else into the second.
    """
    both, seam, torch = (part.splitlines()[1:] for part in _LIST.read_text().split("\n\n"))
    used = used_names()
    assert sorted([*both, *seam, *torch]) == sorted(used)
    assert {name: used[name] for name in seam} == {name: [_SEAM] for name in seam}
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


def test_tokens_are_read_from_the_keys_of_either():
    """``make main`` asks a checkout of main itself."""
    training = TrainingConfig(local_batch_size=8, seq_len=128)
    assert tokens_of_microbatch(training) == (1024, 128)
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=2)
    assert tokens_of_microbatch(training, parallelism) == (256, 128)
    main = SimpleNamespace(num_tokens_per_microbatch_per_dp_rank=512, max_context_length=128)
    assert tokens_of_microbatch(main, parallelism) == (512, 128)
