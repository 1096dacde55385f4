"""The levels of CONTRIBUTING.md: imports point one way, and no folder is too large."""

import ast
from dataclasses import fields
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

from torchtitan.config import ParallelismConfig as TitanParallelismConfig

from titan_ext.parallelize.keys import ParallelismConfig

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "titan_ext").rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in FILES}


def _imports(path: Path) -> set[str]:
    """What a file imports of titan_ext, at the top, in a function, or for types alone."""
    found: set[str] = set()
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            submodules = {f"{base}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= submodules or {base}
    return found & (MODULES.keys() - {_module(path)})


FLOORS = (
    {"config_registry", "api", "__main__"},
    {"verify"},
    {"plan"},
    {"run"},
    {"parallelize", "debug"},
    {"activation_checkpoint"},
    {"fsdp", "components"},
    {"fp8", "toml"},
    {"base"},
)
"""From the door down. What is on one floor does not import each other."""


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_imports_point_down_the_floors():
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {_room(module) for module in MODULES} - {""}
    assert rooms == floor_of.keys()
    assert len(rooms - {"__main__"}) <= 13
    up = [
        f"{module} -> {imported}"
        for module, path in MODULES.items()
        for imported in _imports(path) - {"titan_ext"}
        if _room(module) not in ("", _room(imported), "__main__")
        and floor_of[_room(module)] >= floor_of[_room(imported)]
    ]
    assert not up


def test_arrows_run_one_way():
    graph = {module: _imports(path) for module, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 200
    assert list(TopologicalSorter(graph).static_order())  # a circle is a CycleError that names it


def test_fp8_knows_nothing_of_titan():
    for path in FILES:
        if path.parent.name == "fp8":
            known = ("titan_ext.fp8", "titan_ext.base.tensors")
            assert not {name for name in _imports(path) if not name.startswith(known)}, path
            assert "torchtitan" not in path.read_text(), path


def test_our_keys_are_read_where_they_are_resolved():
    """Passes, plans and records read the recipe that these make of a section."""
    keys = {field.name for field in fields(ParallelismConfig)}
    keys -= {field.name for field in fields(TitanParallelismConfig)}
    keys.add("fsdp_reshard_after_forward")
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in keys:
                found.add(path.name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                named = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if keys & {name for name in named if isinstance(name, str)}:
                    found.add(path.name)
    assert found == {"exchange_policy.py"}  # fsdp/settings.py reads fsdp_* by its own fields
