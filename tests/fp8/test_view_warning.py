"""FSDP2's warning of units that return views: true in general, and not for Titan's blocks.

Titan's MoE without shared experts (qwen3) returns a view, which with sub-module units is a unit's
output. FSDP2 warns that an operation in place on it drops the hook that gathers the unit again.
"""

import ast
from pathlib import Path

import torchtitan.models

from tests.helpers.collectives import planned_steps
from tests.helpers.training import Run

_WARNING = "returned a view tensor"


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


def test_nothing_warns_of_titans_moe(tmp_path: Path):
    """Its step is bit for bit stock's in the matrix."""
    run = Run(model="qwen3_moe", world=64, global_batch=64, layers=1, parallelize="submodule")
    assert planned_steps(tmp_path, run)
    assert _WARNING not in (tmp_path / "planned" / "rank_0.log").read_text()
