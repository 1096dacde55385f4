"""Halves of models that nobody here wrote: subclasses, hooks, attributes, contexts, layouts.

Each case edits a model twice: one runs whole, without any overlap, and one in halves. Some run with
shared experts ahead of the exchange, too, as by default. All must compute the same.
"""

import functools
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from tests.helpers.cluster import run_ranks
from tests.helpers.dry_run import arguments_of, build_on_meta
from tests.helpers.on_cpu import quick_initialisation
from tests.helpers.training import Run, make_config
from titan_ext.base import no_accelerator
from titan_ext.base.tensors import in_backward

RUN = Run(world=2, ep=2, layers=2, narrow=True, parallelize="submodule", ac="selective")
RUN = replace(RUN, param_dtype="float32", global_batch=4, seq_len=32)
TP = replace(RUN, tp=2, sequence_parallel=False, global_batch=2)
TYPES, DTENSOR = "spmd_types", "partial_dtensor"


@dataclass(frozen=True)
class Case:
    """A model of a user's.

    Attributes:
        before: Edits it before it is parallelized.
        after: Edits it afterwards.
        says: What it is refused with in halves; "" if it runs.
        compiles: Whether it takes a compiler's time.
        ahead: Whether it runs with shared experts ahead, too.
    """

    run: Run = RUN
    before: Callable[[Any], Any] = lambda _: None
    after: Callable[[Any], Any] = lambda _: None
    says: str = ""
    compiles: bool = False
    ahead: bool = False


def _subclass(path: str, forward: Callable[..., Any]) -> Callable[[Any], None]:
    """Make the module at ``path`` of the MoE block one of a subclass with such a ``forward``."""

    def edit(model: Any) -> None:
        module = model.layers["1"].get_submodule(path)
        base = type(module)

        @functools.wraps(base.forward)  # Titan shards arguments by name
        def of_subclass(self: Any, *args: Any) -> Any:
            return forward(functools.partial(base.forward, self), self, *args)

        module.__class__ = type("Mine", (base,), {"forward": of_subclass})

    return edit


def _scaled(base: Any, self: Any, x: Any, *args: Any) -> Any:
    return 0.5 * base(x, *args) + 0.1 * x


def _by_sequence(base: Any, self: Any, x_BLD: Any) -> Any:
    return base(x_BLD) * (1 + x_BLD.mean(1, keepdim=True))


def _without_grad(base: Any, self: Any, *args: Any) -> Any:
    with torch.no_grad():
        return base(*args)


def _in_contexts(base: Any, self: Any, *args: Any) -> Any:
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(),), lambda x: x[0])
    named = torch.profiler.record_function("mine")
    with hooks, Calls(), Operations(), torch.autocast("cpu", enabled=False), named:
        return base(*args)


def _keep_logits(base: Any, self: Any, x: Any, *args: Any) -> Any:
    out = base(x, *args)
    self.last_logits = out[2]
    self.kept = {"z": out[2].flatten(0, 1).logsumexp(-1)}
    return out


def _block(base: Any, self: Any, x: Any, masks: Any, positions: Any = None) -> Any:
    """Titan's, and it reads what its modules have, before and after they run."""
    moe = self.moe
    x = x * moe.router.top_k + moe.routed_experts.inner_experts.num_experts
    x = x / moe.shared_experts.w1.in_features
    x = base(x, masks, positions)
    kept = getattr(moe.router, "last_logits", None)
    return x if kept is None else x + 100 * kept[..., :2].diff()


def _checkpointed(reentrant: bool) -> Callable[..., Any]:
    def block(base: Any, self: Any, x: Any, masks: Any, positions: Any = None) -> Any:
        x = x + self.attention(self.attention_norm(x), masks, positions)
        return x + cast(Any, checkpoint)(self.moe, self.ffn_norm(x), use_reentrant=reentrant)

    return block


PARTS = ("attention", "moe.router", "moe.routed_experts", "moe.routed_experts.inner_experts")
PARTS += ("moe.shared_experts", "moe", "")


def _hook_all(model: Any) -> None:
    """Hooks that count, and that change inputs and outputs, on every part of the MoE block."""
    model.calls = Counter()
    for path in PARTS:

        def before(module: Any, args: Any, path: str = path) -> Any:
            return (args[0] * 0.75, *args[1:])

        def after(module: Any, args: Any, out: Any, path: str = path) -> Any:
            if not in_backward():
                model.calls[path, args[0].dim(), isinstance(out, tuple)] += 1
            return out if isinstance(out, tuple) else 2 * out

        module = model.layers["1"].get_submodule(path)
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def _compile_moe(model: Any) -> None:
    model.layers["1"].moe.compile(backend="eager")


NOT_CHECKPOINTED = replace(RUN, ac="none")
CASES = {
    "TP": Case(TP, ahead=True),
    "TP, sequence parallel": Case(replace(TP, sequence_parallel=True)),
    "TP, DTensor": Case(replace(TP, backend=DTENSOR)),
    "TP, DTensor, sequence parallel": Case(
        replace(TP, backend=DTENSOR, sequence_parallel=True), ahead=True
    ),
    "TP, even top_k": Case(replace(TP, model="qwen3_moe", ac="full")),
    "subclass of routed experts": Case(before=_subclass("moe.routed_experts", _scaled)),
    "subclass of shared experts": Case(
        before=_subclass("moe.shared_experts", _by_sequence), ahead=True
    ),
    "no_grad around experts": Case(before=_subclass("moe.routed_experts", _without_grad)),
    "contexts around experts": Case(before=_subclass("moe.routed_experts", _in_contexts)),
    "a block that reads": Case(before=_subclass("", _block)),
    "a router that keeps": Case(before=_subclass("moe.router", _keep_logits)),
    "a block that reads what is kept": Case(
        before=lambda model: [
            _subclass("moe.router", _keep_logits)(model),
            _subclass("", _block)(model),
        ]
    ),
    "hooks": Case(after=_hook_all, ahead=True),
    "hooks, TP": Case(TP, after=_hook_all),
    "checkpoint around moe": Case(NOT_CHECKPOINTED, before=_subclass("", _checkpointed(False))),
    "reentrant checkpoint around moe": Case(
        NOT_CHECKPOINTED,
        before=_subclass("", _checkpointed(True)),
        says="inside of CheckpointFunction.forward",
    ),
    "compiled moe": Case(after=_compile_moe, compiles=True),
}


Together = tuple[int, str, bool]


def _together(case: Case) -> Together:
    """Cases with the same run in one process: Titan keeps the meshes of one layout."""
    return case.run.tp, case.run.backend, case.compiles


def _judge(together: Together, folder: Path) -> dict[str, dict[str, Any]]:
    """Results of each case by arm; of gradients the distance from those of the whole batch.

    The gradients themselves, of all cases, arms and ranks, are 5 GB.
    """
    no_accelerator.enable()
    dist.init_process_group("gloo")
    found = {}
    for name in (name for name, case in CASES.items() if _together(case) == together):
        ahead = ["ahead"] if CASES[name].ahead else []
        arms = ["halves"] if CASES[name].says else ["whole", *ahead, "halves"]
        found[name] = {arm: _train(CASES[name], arm, folder) for arm in arms}
        grads = {arm: result.pop("grads", {}) for arm, result in found[name].items()}
        for arm, result in found[name].items():
            result["off"] = {
                key: _distance(grad, grads[arms[0]].get(key)) for key, grad in grads[arm].items()
            }
        gc.collect()  # modules and their hooks refer to each other
    return found


@functools.cache
def _dims(tp: int, backend: str) -> Any:
    keys: Any = make_config(replace(TP if tp > 1 else RUN, backend=backend), Path()).parallelism
    return ParallelDims.from_config(keys, 2)


def _distance(grad: Any, other: Any) -> tuple[float, float]:
    """The norm of a difference, and that of ``other``; without it, no distance is small enough."""
    if other is None:
        return np.inf, 0.0
    off, norm = np.linalg.norm(grad - other.astype(np.float64)), np.linalg.norm(other)
    return float(off), float(norm)


def _train(case: Case, arm: str, folder: Path) -> dict[str, Any]:
    """Loss, gradients and what is counted of one forward and backward; or what was raised."""

    def local(x: Any) -> Any:
        return x.full_tensor() if isinstance(x, DTensor) else x

    overlap = {"halves": "halves", "ahead": "shared_experts"}.get(arm, "none")
    config: Any = make_config(replace(case.run, overlap_exchanges=overlap), folder)
    dims = _dims(case.run.tp, case.run.backend)
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    context = dist_utils.get_spmd_context(parallel_dims=dims)
    with context():  # from now on these are Titan's meshes
        pass
    model = build_on_meta(config)
    case.before(model)
    quickly = quick_initialisation()
    with no_accelerator.layout_independent_init(), quickly, torch.random.fork_rng():
        torch.manual_seed(1)
        arguments = arguments_of(config, dims)
        model = config.model_spec.parallelize_fn(model, **arguments, dump_folder=str(folder))
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
    model.train()
    case.after(model)
    rank = 0 if case.run.tp > 1 else torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    length = case.run.seq_len
    tokens_BL = torch.randint(0, 2000, (2, length), generator=generator)
    positions_BL = torch.arange(length).expand(2, -1)
    try:
        with context():
            out = local(model(tokens_BL, positions=positions_BL))
            weights = torch.linspace(0.5, 1.5, out.numel()).view_as(out)
            loss = (out.float() * weights).pow(2).mean()
            router = model.layers["1"].moe.router
            if (logits := getattr(router, "last_logits", None)) is not None:
                assert len(logits) == 2
                loss = loss + (logits.logsumexp(-1) * torch.tensor([[1.0], [2.0]])).pow(2).sum()
                loss = loss + router.kept["z"].pow(2).sum()
            loss.backward()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    grads = {
        name: local(param.grad).float().flatten().numpy()
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    calls = dict(getattr(model, "calls", {}))
    return {"loss": loss.item(), "grads": grads, "calls": calls}


def _is_slow(together: Together) -> bool:
    _, backend, compiles = together
    return compiles or backend == DTENSOR


@pytest.mark.parametrize(
    "together",
    [
        pytest.param(together, marks=[pytest.mark.slow] * _is_slow(together))
        for together in dict.fromkeys(map(_together, CASES.values()))
    ],
    ids=str,
)
def test_halves_compute_what_the_whole_does(together: Together, tmp_path: Path):
    for of_rank in run_ranks(_judge, 2, together, tmp_path, log_folder=tmp_path):
        for name, arms in of_rank.items():
            _compare(name, arms)


def _compare(name: str, arms: dict[str, dict[str, Any]]) -> None:
    if CASES[name].says:
        assert CASES[name].says in arms["halves"]["error"], name
        return
    assert [arm.get("error") for arm in arms.values()] == [None] * len(arms), name
    whole, *ahead, halves = arms.values()
    assert [arm["loss"] for arm in ahead] == [whole["loss"]] * len(ahead), name
    assert halves["loss"] == pytest.approx(whole["loss"], rel=1e-5), name
    twice = {key: n * (2 if key[0] else 1) for key, n in whole["calls"].items()}
    assert halves["calls"] == twice, name
    assert [arm["calls"] for arm in ahead] == [whole["calls"]] * len(ahead), name
    # Sums in another order, and of halves those of bf16 products.
    for arm, most in (*((arm, 1e-5) for arm in ahead), (halves, 5e-3)):
        assert [key for key, (off, norm) in arm["off"].items() if off > most * norm] == [], name
        assert arm["off"].keys() == whole["off"].keys() != set(), name
