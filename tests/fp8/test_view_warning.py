"""FSDP2's warning of units that return views: true in general, and not for Titan's blocks.

Titan's MoE without shared experts (qwen3) returns a view, which with sub-module units is a unit's
output. FSDP2 warns that an operation in place on it drops the hook that gathers the unit again.
"""

import ast
import warnings
from pathlib import Path

import torch
import torchtitan.models

from tests.helpers.training import small_spec
from titan_ext.api import build_decoder
from titan_ext.parallelize.keys import ParallelismConfig


def test_no_block_of_titan_works_in_place():
    """The proof for all of them: their forwards have no such operation on anything."""
    found = {}
    for source in Path(torchtitan.models.__path__[0]).glob("*/*.py"):
        for cls in ast.walk(ast.parse(source.read_text())):
            if isinstance(cls, ast.ClassDef) and cls.name.endswith(
                ("TransformerBlock", "MTPBlock")
            ):
                found[cls.name] = [
                    ast.unparse(node) for node in ast.walk(cls) if _is_in_place(node)
                ]
    assert len(found) >= 6
    assert {name: found[name] for name in found if found[name]} == {}


def _is_in_place(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    name = (
        node.func.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        else ""
    )
    return name.endswith("_") and not name.endswith("__")


def test_nothing_warns_of_titans_moe(one_rank: None):
    """Its step is bit for bit stock's in the matrix."""
    spec = small_spec(1, "qwen3_moe")
    positions = torch.arange(8).view(1, -1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, _ = build_decoder(spec, parallelism=ParallelismConfig(fsdp_wrap="submodule"))
        assert model(positions, positions=positions).grad_fn
    assert not [each for each in seen if "returned a view tensor" in str(each.message)]
