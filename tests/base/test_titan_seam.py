"""``titan_ext.base.titan``, which alone knows that there is more than one TorchTitan.

Here is 0.3, or what ``make main`` has installed; what is only for main is called directly.
"""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.config import ParallelismConfig, TrainingConfig

from titan_ext.base.no_accelerator import CausalAttention
from titan_ext.base.titan.attention import with_packed_tokens
from titan_ext.base.titan.batch import (
    NEW,
    OLD,
    in_tokens,
    own_keys,
    shape_of_tokens,
    tokens_of_microbatch,
    unit_of_batch,
    wrong_global_batch,
)

ROOT = Path(__file__).parents[2] / "titan_ext"
_MESHES = ("get_mesh", "get_optional_mesh", "get_activated_mesh", "resolve_mesh", "build_mesh")
_TRAINING = SimpleNamespace(
    max_context_length=2048,
    num_tokens_per_microbatch_per_dp_rank=16384,
    num_tokens_per_train_step=-1,
)
_PARALLELISM = SimpleNamespace(num_pp_microbatches=1, pipeline_parallel_degree=1)


def _asks_which(source: str) -> list[str]:
    """How a file tells 0.3 from main: by a version, keys that one of them has, or meshes."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    keys = {*OLD, *NEW, *(f"training.{key}" for key in (*OLD, *NEW))}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in keys:
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and node.value in keys and id(node) not in docstrings:
            found.append(str(node.value))
        elif isinstance(node, ast.Try) and any(
            isinstance(x, ast.ImportFrom) and (x.module or "").startswith("torchtitan")
            for x in ast.walk(node)
        ):
            found.append("try: import torchtitan")
        elif isinstance(node, ast.Attribute) and node.attr in _MESHES:
            found.append(node.attr)
    if "torchtitan.__version__" in source:
        found.append("torchtitan.__version__")
    return found


def test_no_other_file_asks_which_titan_there_is():
    asking = {
        str(path.relative_to(ROOT)): found
        for path in sorted(ROOT.rglob("*.py"))
        if (found := _asks_which(path.read_text()))
    }
    assert {name for name in asking if "base/titan/" in name} >= {"base/titan/batch.py"}
    assert not {name: found for name, found in asking.items() if "base/titan/" not in name}


@pytest.mark.parametrize(
    "question",
    [
        "if hasattr(training, 'seq_len'): pass",
        "rows = config.training.local_batch_size",
        "key = 'training.max_context_length'",
        "try:\n    from torchtitan.components.data import X\nexcept ImportError: pass",
        "mesh = parallel_dims.get_mesh('fsdp')",
        "import torchtitan\nnew = torchtitan.__version__ > '0.3'",
    ],
)
def test_a_file_that_asks_is_found(question: str):
    assert _asks_which(question)


@pytest.mark.parametrize(
    ("tables", "tokens", "context", "step", "microbatches"),
    [
        ([{"training": {"local_batch_size": 4, "seq_len": 256}}], 1024, 256, -1, 1),
        # Other keys of one file, or in two: 8 sequences stay 8.
        ([{"training": {"seq_len": 256}}], 2048, 256, -1, 1),
        ([{"training": {"local_batch_size": 2}}, {"training": {"seq_len": 64}}], 128, 64, -1, 1),
        ([{"training": {"seq_len": 64, "global_batch_size": 32}}], 512, 64, 2048, 1),
        # A pipeline's microbatches have one sequence, as 0.3's default is.
        (
            [
                {"training": {"local_batch_size": 8, "seq_len": 64}},
                {"parallelism": {"pipeline_parallel_degree": 2}},
            ],
            64,
            64,
            -1,
            8,
        ),
        (
            [
                {
                    "training": {"local_batch_size": 8, "seq_len": 64},
                    "parallelism": {
                        "pipeline_parallel_degree": 2,
                        "pipeline_parallel_microbatch_size": 2,
                    },
                }
            ],
            128,
            64,
            -1,
            4,
        ),
        # Main's keys in a later file win, and count for keys of 0.3 in a later one.
        (
            [
                {"training": {"local_batch_size": 8, "seq_len": 64}},
                {"training": {"num_tokens_per_microbatch_per_dp_rank": 4096}},
            ],
            4096,
            64,
            -1,
            1,
        ),
        (
            [
                {"training": {"num_tokens_per_microbatch_per_dp_rank": 4096}},
                {"training": {"seq_len": 512}},
            ],
            1024,
            512,
            -1,
            1,
        ),
    ],
)
def test_a_file_with_keys_of_0_3_means_the_same_on_main(
    tables: list[dict[str, Any]], tokens: int, context: int, step: int, microbatches: int
):
    before = [dict(table) for table in tables]
    own = in_tokens(tables, _TRAINING, _PARALLELISM)
    assert tables == before, "they stay as they are"
    assert len(own) == len(tables), "a table for each file"
    training, parallelism = vars(_TRAINING) | {}, vars(_PARALLELISM) | {}
    for table in own:
        training |= table.get("training", {})
        parallelism |= table.get("parallelism", {})
    assert not {*OLD} & {*training, *parallelism}
    assert training["num_tokens_per_microbatch_per_dp_rank"] == tokens
    assert training["max_context_length"] == context
    assert training["num_tokens_per_train_step"] == step
    assert parallelism["num_pp_microbatches"] == microbatches


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"training": {"seq_len": 64, "max_context_length": 64}}, "and both are given"),
        (
            {
                "training": {"local_batch_size": 3},
                "parallelism": {
                    "pipeline_parallel_degree": 2,
                    "pipeline_parallel_microbatch_size": 2,
                },
            },
            "local_batch_size is 3; expected a multiple of .*, which is 2",
        ),
    ],
)
def test_what_cannot_be_counted_in_tokens_is_refused(table: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        in_tokens([table], _TRAINING, _PARALLELISM)


def test_what_is_no_number_is_left_for_the_check_of_types():
    table = {"training": {"local_batch_size": "4"}, "parallelism": 3}
    assert in_tokens([table], _TRAINING, _PARALLELISM) == [table]


def test_files_stay_as_they_are_on_0_3():
    table = {"training": {"seq_len": 64}}
    assert own_keys([table], TrainingConfig(), ParallelismConfig()) == [table]


def test_tokens_are_read_from_the_keys_of_either():
    """``make main`` asks a checkout of main itself."""
    training = TrainingConfig(local_batch_size=8, seq_len=128)
    assert tokens_of_microbatch(training) == (1024, 128)
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=2)
    assert tokens_of_microbatch(training, parallelism) == (256, 128)
    main = SimpleNamespace(num_tokens_per_microbatch_per_dp_rank=512, max_context_length=128)
    assert tokens_of_microbatch(main, parallelism) == (512, 128)
    assert shape_of_tokens(1024, 128, 2) == (8, 64)


def test_a_step_is_whole_passes():
    training = TrainingConfig(local_batch_size=4, global_batch_size=24)
    config = SimpleNamespace(training=training, parallelism=ParallelismConfig())
    assert not wrong_global_batch(config, 3)
    assert "is 24; expected a multiple of 16" in wrong_global_batch(config, 4)
    assert unit_of_batch({"training.local_batch_size": 4, "training.seq_len": 128}) == 1


class _Packed(CausalAttention):
    rows: int = 1
    forward = with_packed_tokens(CausalAttention.forward)


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_tokens_are_attended_as_a_batch(rows: int):
    torch.manual_seed(0)
    batch_BLNH = [torch.randn(rows, 8, 4, 16) for _ in range(3)]
    attention, packed = CausalAttention.Config().build(), _Packed(CausalAttention.Config())
    packed.rows = rows
    seen = []

    def note(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        seen.append(lse)
        return out * lse.unsqueeze(-1)

    for extra in ({}, {"out_transform": note}):
        want_BLNH = attention(*batch_BLNH, **extra)
        got_TNH = packed(*(x.flatten(0, 1) for x in batch_BLNH), **extra)
        assert torch.equal(got_TNH, want_BLNH.flatten(0, 1))
    assert seen[1].shape == (rows * 8, 4), "the log-sum-exp is packed, too"
