"""FSDP2's warning of units that return views: true in general, and not for Titan's blocks.

Titan's MoE without shared experts (qwen3) returns a view, which with sub-module units is a unit's
output. FSDP2 warns that an operation in place on it drops the hook that gathers the unit again.
"""

import ast
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn as nn
import torchtitan.models
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers.collectives import planned_steps
from tests.helpers.training import Run

_WARNING = "returned a view tensor"


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).view(-1, 4)


class _Block(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.ffn, self.in_place = _Unit(), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.ffn(x)
        if self.in_place:
            out += x
            return out
        return out + x


@pytest.mark.parametrize("in_place", [False, True])
def test_only_an_operation_in_place_does_harm(in_place: bool, one_rank: None):
    torch.manual_seed(0)
    block, x = _Block(in_place), torch.randn(3, 4, requires_grad=True)
    block(x).sum().backward()
    expected: Any = [param.grad for param in block.parameters()]
    block.zero_grad()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(block.ffn, mesh=mesh, reshard_after_forward=True)
    fully_shard(block, mesh=mesh)
    with pytest.warns(UserWarning, match=_WARNING):
        out = block(x)
    if in_place:
        with pytest.raises(RuntimeError, match="storage of size 0"):
            out.sum().backward()
        return
    out.sum().backward()
    for param, grad in zip(block.parameters(), expected, strict=True):
        assert torch.equal(cast(Any, param.grad).full_tensor(), grad)


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
