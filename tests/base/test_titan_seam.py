"""``titan_ext.base.titan``, which alone knows what another TorchTitan has elsewhere."""

import ast
from pathlib import Path
from types import SimpleNamespace

from torchtitan.config import ParallelismConfig, TrainingConfig

from titan_ext.base.titan.batch import (
    GLOBAL_BATCH,
    LOCAL_BATCH,
    MICROBATCH,
    SEQUENCE,
    tokens_of_microbatch,
    wrong_global_batch,
)

ROOT = Path(__file__).parents[2] / "titan_ext"
_MESHES = ("get_mesh", "get_optional_mesh", "get_activated_mesh", "resolve_mesh", "build_mesh")


def _asks(source: str) -> list[str]:
    """What a file asks TorchTitan: its version, how large a batch is, for a mesh."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    keys = {SEQUENCE, LOCAL_BATCH, GLOBAL_BATCH, MICROBATCH}
    keys |= {key.rpartition(".")[2] for key in keys}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in keys:
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and node.value in keys and id(node) not in docstrings:
            found.append(str(node.value))
        elif isinstance(node, ast.Attribute) and node.attr in _MESHES:
            found.append(node.attr)
    if "torchtitan.__version__" in source:
        found.append("torchtitan.__version__")
    return found


def test_no_other_file_asks_for_what_another_titan_has_elsewhere():
    asking = {
        str(path.relative_to(ROOT)): found
        for path in sorted(ROOT.rglob("*.py"))
        if (found := _asks(path.read_text()))
    }
    assert {name for name in asking if "base/titan/" in name} >= {"base/titan/batch.py"}
    assert not {name: found for name, found in asking.items() if "base/titan/" not in name}


def test_tokens_of_a_microbatch():
    training = TrainingConfig(local_batch_size=8, seq_len=128)
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=2)
    for degree, tokens in ((1, 1024), (2, 256)):
        parallelism.pipeline_parallel_degree = degree
        assert tokens_of_microbatch(training, parallelism) == (tokens, 128)


def test_a_step_is_whole_passes():
    training = TrainingConfig(local_batch_size=4, global_batch_size=24)
    config = SimpleNamespace(training=training, parallelism=ParallelismConfig())
    assert not list(wrong_global_batch(config, 3))
    (wrong,) = wrong_global_batch(config, 4)
    assert "is 24; expected a multiple of 16" in wrong
