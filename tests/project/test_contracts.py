"""What titan_ext leans on in torch and TorchTitan beyond their public functions, by name.

A release that changes one of these fails the test that names it, before anything breaks quietly.
What can be read is in ``tests/data/contracts.txt``; what has to run is here.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import os
import re
import textwrap
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torchtitan.trainer
from torch.distributed import distributed_c10d
from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class
from torch.multiprocessing.reductions import StorageWeakRef
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.config import ConfigManager
from torchtitan.ops.scatter_add import deterministic_scatter_add

from titan_ext.config_registry.terminal import _NOISE
from titan_ext.parallelize import limits

LIST = Path(__file__).parents[1] / "data" / "contracts.txt"


class _Code:
    """What a function, a class or a module says, whatever its layout and its comments."""

    def __init__(self, subject: Any) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(subject)))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        self.pieces = [ast.unparse(node) for node in nodes]
        self.calls = Counter(ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))

    def place(self, piece: str) -> int:
        """Where it begins, or -1; an ``if`` or a loop goes on after its piece, as a call may."""
        with contextlib.suppress(SyntaxError):
            (statement,) = ast.parse(piece).body
            piece = ast.unparse(statement.value if isinstance(statement, ast.Expr) else statement)
            found = (i for i, p in enumerate(self.pieces) if f"{p}\n".startswith(f"{piece}\n"))
            return next(found, -1)
        return next((i for i, p in enumerate(self.pieces) if p.startswith(piece)), -1)


def _numbers(version: str) -> list[int]:
    """The first two of a version, or none."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


class Contract(NamedTuple):
    """A name, and what it has to be for the file of ours that leans on it."""

    needed_by: str
    name: str
    since: str
    """The first release of torch that has it; "" for any."""
    checks: list[str]

    def wrong(self) -> list[str]:
        """What is not as it was, in words."""
        if _numbers(self.since) > _numbers(torch.__version__):
            return []
        try:
            subject = _resolve(self.name)
            wrong = [check for check in self.checks if not _holds(subject, check)]
        except (ImportError, AttributeError, TypeError) as error:
            wrong = [str(error)]
        return [f"titan_ext.{self.needed_by} needs {self.name}: {words}" for words in wrong]


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    subject: Any = importlib.import_module(module)
    for part in path.split("."):
        owner, subject = subject, getattr(subject, part)
        static = inspect.getattr_static(owner, part, None)
        subject = static.fget if isinstance(static, property) else subject
    return subject


def _names(subject: Any) -> list[str]:
    if dataclasses.is_dataclass(subject):
        return [field.name for field in dataclasses.fields(subject)]
    return [*getattr(subject, "_fields", dir(subject))]


def _holds(subject: Any, check: str) -> bool:
    kind, _, rest = check.partition(" ")
    if kind[0] in "({":
        names = _names(subject) if kind[0] == "{" else [*inspect.signature(subject).parameters]
        wanted = check[1:-1].split(", ")
        if kind[0] == "{":
            return set(wanted) - {"..."} <= set(names) if "..." in wanted else wanted == names
        pattern = "".join(r"(\w+,)*" if name == "..." else f"{name}," for name in wanted)
        return bool(re.fullmatch(pattern, "".join(f"{name}," for name in names)))
    if kind == "is":
        return subject == eval(rest)
    if kind == "under":
        return issubclass(subject, _resolve(rest))
    code = _Code(subject)
    if kind == "calls":
        name, _, count = rest.partition(" ")
        return code.calls[name] == int(count) if count else name in code.calls
    if kind == "order":
        places = [code.place(piece) for piece in rest.split(" < ")]
        return places == sorted(set(places)) and places[0] >= 0
    assert kind == "says", check
    is_there = code.place(rest.removeprefix("not ").replace("\\n", "\n")) >= 0
    return is_there != rest.startswith("not ")


def _read() -> tuple[dict[str, str], list[Contract]]:
    """The versions that the list was read with, and what it has."""
    versions: dict[str, str] = {}
    found: list[Contract] = []
    needed_by = since = module = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("versions "):
            versions = dict(pair.split() for pair in line[9:].split(", "))
        elif line.startswith("["):
            needed_by, _, since = line[1:-1].partition(": torch ")
        elif line.startswith("  "):
            found[-1].checks.append(line.strip())
        elif line and line[0] != "#":
            module = line.partition(":")[0] if ":" in line else module
            name = line if ":" in line else f"{module}:{line}"
            found.append(Contract(needed_by, name, since, []))
    return versions, found


def test_what_we_lean_on_is_as_it_was():
    """Read where a version is not the recorded one, or where CONTRACTS is set: 2 CPU seconds."""
    versions, contracts = _read()
    installed = {name: metadata.version(name).partition("+")[0] for name in versions}
    others = [name for name in versions if versions[name] != installed[name]]
    read = others or "CONTRACTS" in os.environ
    wrong = [words for contract in contracts if read for words in contract.wrong()]
    said = "; ".join(f"installed {n} {installed[n]}, recorded {versions[n]}" for n in others)
    assert not wrong, "\n".join([said, *wrong])
    if others:
        warnings.warn(f"{said}: all that {LIST.name} names is as it was; record it", stacklevel=1)


@pytest.mark.parametrize(
    "check",
    [
        "(self, other)",
        "(..., self)",
        "{encode}",
        "{..., code, ...}",
        "says return other",
        "says not o.__class__",
        "calls TypeError 2",
        "calls KeyError",
        "order raise TypeError( < def default(self, o):",
        "is None",
        "under json:JSONDecoder",
    ],
)
def test_what_is_not_as_it_was_is_told(check: str):
    name = "json:JSONEncoder" if check[0] in "{u" else "json:JSONEncoder.default"
    (wrong,) = Contract("toml", name, "", [check]).wrong()
    assert wrong == f"titan_ext.toml needs {name}: {check}"
    assert Contract("toml", "json:JSONEncoder.gone", "", []).wrong()


def _private_names() -> set[str]:
    """Those of other packages in titan_ext: imported, or attributes that it does not define."""
    own, used = set(), set()
    for path in (Path(__file__).parents[2] / "titan_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)) if not module.startswith("titan_ext"):
                    used |= {alias.name for alias in node.names} | {*module.split(".")}
                case ast.Attribute(ctx=ast.Store(), value=ast.Name("self" | "cls")):
                    own.add(node.attr)
                case ast.Attribute(value=ast.Name("sys" | "os")):
                    pass  # Python's own
                case ast.Attribute():
                    used.add(node.attr)
                case ast.FunctionDef() | ast.ClassDef():
                    own.add(node.name)
                case ast.arg() | ast.Name(ctx=ast.Store()):
                    own.add(node.arg if isinstance(node, ast.arg) else node.id)
    return {name for name in used - own if re.match(r"_[^_]", name)}


def test_every_private_name_has_a_contract():
    """In the list, or in a test below that runs it."""
    named = set(re.findall(r"\w+", LIST.read_text() + Path(__file__).read_text()))
    assert len(_private_names()) > 80
    assert _private_names() <= named, sorted(_private_names() - named)


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_a_store_does_what_ranks_agree_by(kind: str):
    """base.agreement: a word is set once, and raised only from what was read."""
    tcp = kind == "tcp"
    plain = dist.TCPStore("127.0.0.1", 0, is_master=True) if tcp else dist.HashStore()
    store: Any = dist.PrefixStore("subject", plain)
    assert not store.check(["word"])
    assert store.compare_set("word", "", "7") == b"7"
    assert store.compare_set("word", "", "8") == b"7"
    assert store.compare_set("word", "7", "9") == b"9"
    store.append("list", "1 ")
    store.append("list", "2 ")
    assert store.get("list") == b"1 2 "
    assert (store.add("count", 1), store.add("count", 1), store.add("count", 0)) == (1, 2, 2)
    assert store.check(["word"])
    assert not dist.PrefixStore("other", plain).check(["word"])


def test_storage_weak_ref_keeps_the_id_and_not_the_bytes():
    """torch.multiprocessing.reductions.StorageWeakRef, UntypedStorage._cdata."""
    storage = torch.empty(64).untyped_storage()
    address = storage._cdata
    reference = StorageWeakRef(storage)
    assert reference.cdata == address
    del storage
    assert reference.expired()
    others = [torch.empty(64).untyped_storage() for _ in range(100)]
    assert address not in {other._cdata for other in others}


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("Interleaved1F1B", False),
        ("LoopedBFS", False),
        ("InterleavedZeroBubble", True),
        ("ZBVZeroBubble", True),
        ("DualPipeV", True),
    ],
)
def test_torch_schedules_that_split_backward(name: str, splits: bool):
    """titan_ext.parallelize.limits knows them by their class."""
    stages: Any = [MagicMock(group_size=2, group_rank=0, num_stages=4) for _ in range(2)]
    for index, stage in zip((0, 3 if "V" in name else 2), stages, strict=True):
        stage.stage_index, stage.is_first, stage.is_last = index, index == 0, index == 3
    schedule = get_schedule_class(name)(stages, n_microbatches=4)
    actions = [a for order in cast(Any, schedule).pipeline_order.values() for a in order if a]
    kinds = {kind.computation_type for kind in actions}
    assert (_ComputationType.BACKWARD_WEIGHT in kinds) is splits
    assert (type(schedule) in limits._SPLIT_BACKWARD) is splits


def test_operations_that_pass_values_on_save_none_for_backward():
    """titan_ext.activation_checkpoint.discards: neither operands nor results, in a Function of
    torch.library's."""
    x = torch.ones(4, 2, requires_grad=True)
    index = torch.zeros(4, 2, dtype=torch.int64)
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        group = distributed_c10d._get_default_group().group_name
        functional: Any = torch.ops._c10d_functional
        calls = {
            "all_to_all_single": lambda: functional.all_to_all_single(x, [4], [4], group),
            "_wrap_tensor_autograd": lambda: functional._wrap_tensor_autograd(x),
            "all_reduce": lambda: functional.all_reduce(x, "sum", group),
            "all_gather_into_tensor": lambda: functional.all_gather_into_tensor(x, 1, group),
            "reduce_scatter_tensor": lambda: functional.reduce_scatter_tensor(x, "sum", 1, group),
            "wait_tensor": lambda: functional.wait_tensor(x),
            "deterministic_scatter_add": lambda: deterministic_scatter_add(x, index, x),
        }
        for name, call in calls.items():
            saved: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: _):
                out = call()
            node = out.grad_fn
            functional.wait_tensor(out.detach())
            assert not any(tensor.is_floating_point() for tensor in saved), name
            assert node._forward_cls.__module__ == "torch._library.autograd", name
    finally:
        dist.destroy_process_group()


def test_titans_warnings_that_are_never_shown():
    sources = {
        "__post_init__": inspect.getsource(BaseCheckpointManager.Config.__post_init__),
        "_validate_config": inspect.getsource(ConfigManager._validate_config),
        "__init__": inspect.getsource(torchtitan.trainer.Trainer.__init__),
        "get_peak_flops": inspect.getsource(torchtitan.tools.utils),
    }
    for function, words in _NOISE:
        assert f'"{words.removesuffix("nan")}' in sources[function]
