"""Policies in compiled code: what is saved how, what runs again, and what gradients come of it."""

import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch._dynamo
import torch.nn as nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm

from tests.helpers.compiled_op_policies import EXACT, OP_POLICIES
from tests.helpers.fp8_activations import CHOICES, ChecksItself, LooksUp, debug_model
from tests.helpers.training import operations_in
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.compile import (
    CompiledPart,
    _Region,
    _Remade,
    checkpoint_blocks,
    compiled_checkpoint,
    parts,
)
from titan_ext.activation_checkpoint.op_policies import BlockPolicies
from titan_ext.activation_checkpoint.op_rules import parse_rules
from titan_ext.activation_checkpoint.partition import (
    Float8Partitioner,
    Saved,
    _must_stay_exact,
    compile_arguments,
)
from titan_ext.fp8 import Codec
from titan_ext.fsdp.units import Wrap, plan_units
from titan_ext.plan.live import LiveBytes

B, L, D = 2, 64, 256
TOKENS = B * L


@dataclass
class Outcome:
    """One step of the blocks of the debug model."""

    saved: list[list[Saved]]
    """By graph."""
    nbytes: int
    """In storages that wait for backward, those of parameters and buffers not counted."""
    operations: Counter[str]
    graphs: int
    gradients: dict[str, torch.Tensor]
    of_input: torch.Tensor


@pytest.fixture(autouse=True)
def _compiler_settings():
    """What Titan's apply_compile sets, and nothing left of other tests."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, skip_fwd_side_effects_in_bwd_under_checkpoint=True
    ):
        yield
    torch._dynamo.reset()


def without_kernels(gm: Any, inputs: Any, *, options: dict[str, Any] | None = None) -> Any:
    """Inductor with its passes, partitioner and settings; but its graphs run as they are."""

    def keep(gm: Any, inputs: Any, **_: Any) -> Any:
        return make_boxed_func(gm.forward)

    return compile_fx(gm, inputs, inner_compile=cast(Any, keep), config_patches=options)


def run(
    policy: ActivationCheckpointing,
    wrap: Wrap,
    *,
    backend: str | None = "aot_eager",
    kernels: bool = True,
    counts: bool = True,
    layers: int = 2,
    lengths: tuple[int, ...] = (L, L),
    at: Callable[[str], None] = lambda moment: None,
    edit: Callable[[nn.Module], Any] = lambda block: None,
) -> Outcome:
    """Forward and backward of a dense and MoE blocks, for each length; None: eager.

    ``at`` is called where another module could run: before, between, and after them. ``edit`` may
    change each block as it was built. Hooks for saved tensors are there only where it ``counts``.
    """
    model = debug_model(layers=layers)
    for block in model.layers.values():
        edit(block)
    units = plan_units(model, wrap)
    checkpoint_blocks(model, policy, units, compiled=backend is not None)
    saved: list[list[Saved]] = []
    counters.clear()
    if backend is not None:
        arguments = compile_arguments(Float8Partitioner(Codec(), report=saved.append), backend)
        if not kernels:
            arguments["backend"] = without_kernels
        for part in parts(model, units):
            part.compile(fullgraph=True, **arguments)
    waiting: dict[int, int] = {}
    profiler, x_BLD = profile(), torch.empty(0)
    for seq_len in lengths:
        waiting.clear()
        model.zero_grad()
        torch.manual_seed(1)
        x_BLD = torch.randn(B, seq_len, D).bfloat16().requires_grad_()
        profiler = profile(activities=[ProfilerActivity.CPU])
        with profiler:
            at("before")
            h_BLD = x_BLD
            count = torch.autograd.graph.saved_tensors_hooks(_count_into(waiting, model), _same)
            with count if counts else contextlib.nullcontext():
                for block in model.layers.values():
                    h_BLD = block(h_BLD, None, None)
            at("between")
            h_BLD.float().square().mean().backward()
            at("after")
    return Outcome(
        saved=saved,
        nbytes=sum(waiting.values()),
        operations=operations_in(profiler),
        graphs=counters["stats"]["unique_graphs"],
        gradients={
            canonical_fqn(name): cast(Any, p.grad).double()
            for name, p in model.layers.named_parameters()
        },
        of_input=cast(Any, x_BLD.grad).double(),
    )


POLICIES = {"exact": EXACT, "by operation": OP_POLICIES}
POLICIES |= {name: FP8AC.Config(preset=name) for name in ("speed", "memory", "balanced", "gemms")}


@functools.cache
def compiled(policy: str, wrap: Wrap = "submodule", layers: int = 2) -> Outcome:
    """Of ``run``, once for all tests."""
    return run(FP8AC(POLICIES[policy]), wrap, layers=layers)


def _count_into(waiting: dict[int, int], model: Decoder) -> Callable[[torch.Tensor], Any]:
    state = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    alive = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in state:
            waiting[storage._cdata] = storage.nbytes()
            alive.append(storage)  # no other tensor gets its address
        return x

    return pack


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def activations(saved: list[Saved]) -> list[tuple]:
    """Without parameters and buffers: those are inputs that are exact."""
    return [
        (s.source, s.shape, s.treatment)
        for s in saved
        if not (s.source == "input" and s.treatment.startswith("exact"))
    ]


def worst_cosine(a: Outcome, b: Outcome) -> float:
    assert a.gradients.keys() == b.gradients.keys()
    return min(
        torch.cosine_similarity(a.gradients[name].flatten(), b.gradients[name].flatten(), 0).item()
        for name in a.gradients
    )


INPUT = ("input", (B, L, D), "float8 e4m3")
ATTENTION = [
    ("aten.mm", (TOKENS, 3072), "exact"),
    ("aten.mm", (TOKENS, 576), "exact"),
    ("aten.mm", (TOKENS, 4096), "exact"),
]
WO = ("aten.mm", (TOKENS, D), "exact")  # for the residual stream, which a unit is given
MOE = [
    ("aten.topk", (B, L, 3), "exact"),
    ("aten._grouped_mm", (TOKENS * 3, 256), "float8 e4m3"),
    ("aten._grouped_mm", (TOKENS * 3, 256), "exact"),
    ("aten.mm", (TOKENS, 512), "float8 e4m3"),
    ("aten.mm", (TOKENS, 512), "float8 e4m3"),
]
EXPECTED: dict[Wrap, list[list]] = {
    "block": [[INPUT, *ATTENTION, WO], [INPUT, *ATTENTION, WO, *MOE]],
    "submodule": [[INPUT, *ATTENTION], [INPUT], [INPUT, *MOE]],
}


@pytest.mark.parametrize("wrap", [pytest.param("block", marks=pytest.mark.slow), "submodule"])
def test_op_policies_tensor_by_tensor(wrap: Wrap):
    """One graph for each kind of unit; the router and every GEMM whose output is saved run once."""
    outcome = compiled("by operation", wrap)
    assert [activations(saved) for saved in outcome.saved] == EXPECTED[wrap]
    assert outcome.graphs == len(EXPECTED[wrap])
    assert outcome.operations["aten::topk"] == 1

    exact = compiled("exact", wrap)
    assert exact.operations["aten::mm"] == outcome.operations["aten::mm"]
    assert worst_cosine(outcome, exact) > 0.999
    assert worst_cosine(outcome, exact) < 1

    halved = {"block": 2, "submodule": 4}[wrap] * TOKENS * D
    halved += TOKENS * (3 * 256 + 2 * 512)
    assert exact.nbytes - outcome.nbytes == 2 * halved - halved * 129 // 128


class _Stranger(nn.Module):
    """A module of the user's own: a checkpoint that prefers to save what its first layer gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256))
        self.layers.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False, context_fn=_prefer_to_save_matmuls)


def _prefer_to_save_matmuls() -> Any:
    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            return CheckpointPolicy.PREFER_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _strange_gradient(rows: int) -> torch.Tensor:
    """Compiled anew for each number of rows."""
    stranger = _Stranger()
    stranger.compile(backend=without_kernels, fullgraph=True, dynamic=False)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).bfloat16()
    stranger(x.requires_grad_()).float().square().mean().backward()
    weight: Any = stranger.layers[0].weight
    return weight.grad


@pytest.mark.parametrize(
    ("kernels", "layers"),
    [(False, 2), *(pytest.param(True, layers, marks=pytest.mark.slow) for layers in (1, 2))],
)
def test_inductor_stores_the_same_and_compiles_other_modules_as_without_us(
    kernels: bool, layers: int
):
    """Other modules run before, between, and after ours.

    Inductor takes a minute for the kernels of the first layer, which is dense, and longer for the
    second. They round otherwise, which a router may turn into another choice.
    """
    rows = {"before": 64, "between": 96, "after": 128}
    alone = {moment: _strange_gradient(n) for moment, n in rows.items()}
    torch._dynamo.reset()
    moments = []

    def check(moment: str) -> None:
        moments.append(moment)
        assert torch.equal(_strange_gradient(rows[moment]), alone[moment]), moment

    policy = FP8AC(OP_POLICIES)
    inductor = run(
        *(policy, "submodule"),
        backend="inductor",
        kernels=kernels,
        layers=layers,
        lengths=(L,),
        at=check,
    )
    assert moments == list(rows)
    kinds = 2 if layers == 1 else 3
    assert [activations(saved) for saved in inductor.saved] == EXPECTED["submodule"][:kinds]
    aot_eager = compiled("by operation", layers=layers)
    assert inductor.nbytes == aot_eager.nbytes
    assert worst_cosine(inductor, aot_eager) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "kinds"), [(1, 2), (2, 3)])
def test_another_length_is_one_more_graph_of_each_kind(layers: int, kinds: int):
    lengths = (64, 96, 80, 64)
    outcome = run(FP8AC(OP_POLICIES), "submodule", layers=layers, lengths=lengths)
    assert outcome.graphs == 2 * kinds


@pytest.mark.slow
def test_blocks_that_decide_differently_share_no_code():
    """Dynamo would give the second block the code of the first: it does not guard on policies."""

    class SecondLess(FP8AC):
        def compiled_policies(self, block: nn.Module, name: str) -> BlockPolicies:
            plan = super().compiled_policies(block, name)
            rules = parse_rules({"input": "save_float8", "*": "recompute"})
            recipe = replace(plan.recipe, user_rules=rules)
            return replace(plan, recipe=recipe) if name == "layers.2" else plan

    outcome = run(SecondLess(OP_POLICIES), "block", layers=3, lengths=(L,))
    assert [activations(saved) for saved in outcome.saved] == [
        *EXPECTED["block"],
        [INPUT, ("aten.topk", (B, L, 3), "exact")],
    ]


@pytest.mark.slow
def test_nothing_is_computed_again_if_asked():
    """The compiler saves what it would save without a checkpoint, much of it in float8."""
    outcome = run(FP8AC(FP8AC.Config(mode="no_recompute")), "block")
    free = run(_NoAC(SelectiveAC.Config()), "block")
    assert outcome.graphs == 2
    for gemm in ("aten::mm", "aten::_grouped_mm", "aten::topk"):
        assert outcome.operations[gemm] == free.operations[gemm]
    for mine, its in zip(outcome.saved, free.saved, strict=True):
        assert Counter((s.source, s.shape) for s in mine) == Counter(
            (s.source, s.shape) for s in its
        )
        weights = [s for s in mine if s.source == "input" or s.shape == (8, 256, 256)]
        assert [s.shape for s in weights if s.treatment != "exact"] == [(B, L, D)]
    assert outcome.nbytes < 0.85 * free.nbytes
    assert 0.999 < worst_cosine(outcome, free) < 1


def test_what_stays_exact():
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    others = (x, x.float(), x.long(), x[1:], x[:, :1].expand(64, 128))
    assert [_must_stay_exact(y) for y in others] == ["", "float32", "int64", "small", "expanded"]


def test_rows_whose_size_only_the_run_knows_stay_exact():
    """Routing scores of the tokens that came are such."""
    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes):
        came = sizes.create_unbacked_symint()
        vector = torch.empty(came, dtype=torch.bfloat16)
        rows = torch.empty(came, 256, dtype=torch.bfloat16)
    assert [_must_stay_exact(x) for x in (vector, rows)] == ["rows of unknown size", ""]


@pytest.mark.parametrize(
    ("preset", "wrap"),
    [
        ("speed", "submodule"),
        *(
            pytest.param(preset, "block", marks=pytest.mark.slow)
            for preset in ("memory", "balanced", "gemms")
        ),
    ],
)
def test_the_policy_saves_the_same_compiled_as_eager(preset: str, wrap: Wrap):
    """Within 2 % of the bytes, in one graph for each kind of unit, with the same gradients."""
    policy = FP8AC(POLICIES[preset])
    eager = run(policy, wrap, backend=None)
    ours = compiled(preset, wrap)  # the second forward: compiled already
    report = sum(block.nbytes for block in policy.memory_report.blocks)
    assert 0.98 * report < ours.nbytes < 1.02 * report
    assert ours.graphs == len(EXPECTED[wrap])
    assert ours.operations["aten::mm"] <= eager.operations["aten::mm"]
    # A unit's own input is float8 too; a block has only one.
    assert worst_cosine(ours, eager) > (0.9999 if wrap == "block" else 0.998)


@pytest.mark.parametrize(
    ("policy", "wrap", "off"),
    [
        ("speed", "submodule", 0.02),
        ("speed", "experts", 0.02),
        # It discards what backward reads, which is recomputed, and saves what nothing reads.
        ("by operation", "submodule", 0.06),
    ],
)
def test_a_plan_keeps_what_compiled_code_stores(policy: str, wrap: Wrap, off: float):
    """A dry run runs units and pieces without a compiler."""
    live = LiveBytes([], [])
    held: dict[str, int] = {}

    def note(moment: str) -> None:
        sizes = {event.storage: event.nbytes for event in live.events}  # the last is 0 at its end
        held[moment] = sum(sizes.values())

    with torch.compiler.set_stance("force_eager"), live:
        run(FP8AC(POLICIES[policy]), wrap, at=note, lengths=(L,))
    planned = held["between"] - held["before"]
    assert planned == pytest.approx(compiled(policy, wrap).nbytes, rel=off)


def _reads_twice(block: Any, x_BLD: torch.Tensor, masks: Any, positions: Any) -> torch.Tensor:
    h_BLD = block.attention_norm(x_BLD)
    x_BLD = x_BLD + block.attention(h_BLD, masks, positions) + h_BLD
    return x_BLD + block.feed_forward(block.ffn_norm(x_BLD))


def _branches(block: Any, x_BLD: torch.Tensor, masks: Any, positions: Any) -> torch.Tensor:
    assert x_BLD.norm() > 0  # fx cannot know
    return _reads_twice(block, x_BLD, masks, positions)


def _scales(module: nn.Module, inputs: tuple[Any, ...], *output: Any) -> Any:
    return output[0] * 2 if output else (inputs[0] * 2, *inputs[1:])


def _subclass(forward: Callable[..., torch.Tensor]) -> Callable[[nn.Module], None]:
    def edit(block: nn.Module) -> None:
        block.__class__ = type("Users", (type(block),), {"forward": forward})

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(_subclass(_reads_twice), id="reads twice"),
        pytest.param(_subclass(_branches), id="branches"),
        pytest.param(
            lambda block: setattr(block, "forward", functools.partial(_reads_twice, block)),
            id="instance",
        ),
        pytest.param(lambda b: b.attention_norm.register_forward_hook(_scales), id="norm"),
        pytest.param(lambda b: b.attention.register_forward_pre_hook(_scales), id="attention"),
    ],
)
def test_what_stands_between_norm_and_attention_runs_there(edit: Callable[[nn.Module], Any]):
    """A user's block or hook reads what the norm returns, which one region would pass by."""
    policy = FP8AC.Config(preset="stock")
    eager, compiled = (
        run(FP8AC(policy), "submodule", backend=backend, layers=1, lengths=(L,), edit=edit).of_input
        for backend in (None, "aot_eager")
    )
    assert (eager - compiled).norm() < 0.01 * eager.norm()


@pytest.mark.parametrize(
    ("name", "add", "hook"),
    [
        ("attention_norm", "register_forward_hook", "the forward hook .* on a RMSNorm"),
        ("attention", "register_full_backward_hook", "a backward hook"),
    ],
)
def test_a_hook_that_comes_too_late_is_refused(name: str, add: str, hook: str):
    model = debug_model(layers=1)
    policy = FP8AC(FP8AC.Config(preset="stock"))
    checkpoint_blocks(model, policy, plan_units(model, "submodule"), compiled=True)
    block = model.layers["0"]
    getattr(block.get_submodule(name), add)(lambda *_: None)
    says = f"layers.0: {hook} was added .* attention_norm and attention are"
    with pytest.raises(ValueError, match=says):
        block(torch.randn(B, L, D).bfloat16(), None, None)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "llama3", "gpt_oss", "muse_glimmer"])
def test_units_of_titans_blocks_are_compiled_whole(name: str):
    model = debug_model(layers=2, name=name)
    units = plan_units(model, "submodule")
    assert len(list(parts(model, units))) == 2 * len(model.layers)


def _pieces(edit: Callable[[nn.Module], Any] = lambda block: None) -> tuple[Decoder, list]:
    """Blocks in pieces, as where tokens travel: here because FSDP would gather the experts."""
    model = debug_model(layers=2)
    found = list(parts(model, plan_units(model, "experts")))
    edit(model.layers["1"])
    for part in found:
        part.compile(backend="aot_eager", fullgraph=True)
    return model, found


@pytest.mark.parametrize("names", [(), ("x_RD", "num_tokens_per_expert_E")])
def test_experts_are_compiled_once_whatever_arrives(names: tuple[str, ...]):
    """No token, one, all of a batch: routing changes from step to step. Each piece is one graph.

    Also where a user's layer gives them their inputs by ``names``.
    """
    counters.clear()
    _, found = _pieces()
    (experts,) = (part.main for part in found if part.arrives)
    weights = [param.detach().float() for param in experts.parameters()]
    for counts in ([0] * 8, [1] + [0] * 7, [0] * 7 + [384], [48] * 8, [3, 0, 1, 0, 0, 7, 0, 2]) * 4:
        torch.manual_seed(sum(counts))
        x_RD = torch.randn(sum(counts), D).bfloat16().requires_grad_()
        inputs = x_RD, torch.tensor(counts)
        by_name = dict(zip(names, inputs, strict=False))
        out_RD = experts(**by_name) if names else experts(*inputs)
        out_RD.backward(torch.randn_like(out_RD))
        ends = torch.tensor(counts).cumsum(0).tolist()
        w1_EFD, w2_EDF, w3_EFD = weights
        for expert, end in enumerate(ends):
            x = x_RD[end - counts[expert] : end].detach().float()
            h = torch.nn.functional.silu(x @ w1_EFD[expert].T) * (x @ w3_EFD[expert].T)
            expected = h @ w2_EDF[expert].T
            assert torch.allclose(
                out_RD[end - counts[expert] : end].float(), expected, rtol=0.05, atol=1e-3
            )
        assert x_RD.grad is not None
    assert counters["stats"]["unique_graphs"] == 1


def test_a_piece_with_a_hook_inside_stays_eager(caplog: pytest.LogCaptureFixture):
    """The hook sees what it would see, the other pieces are compiled, and the log says it once."""
    seen: list[torch.Size] = []

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        seen.append(out.shape)

    def edit(block: Any) -> None:
        block.moe.router.gate.register_forward_hook(hook)

    counters.clear()
    model, found = _pieces(edit)
    with caplog.at_level("INFO"):
        for _ in range(2):
            h_BLD = torch.randn(B, L, D).bfloat16().requires_grad_()
            for block in model.layers.values():
                h_BLD = block(h_BLD, None, None)
    assert len(seen) == 2
    said = [r.getMessage() for r in caplog.records if "is not compiled" in r.getMessage()]
    assert said == [
        f"layers.1.moe.router is not compiled: the forward hook {hook.__qualname__} on a Linear."
    ]
    assert counters["stats"]["unique_graphs"] == len({part.child for part in found}) - 1


def test_experts_that_branch_on_their_rows_stay_eager(caplog: pytest.LogCaptureFixture):
    """The compiler does not know how many tokens arrive, and calls that an error of the user's."""

    def forward(self: Any, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        return GroupedExperts.forward(self, x_RD * 2 if len(x_RD) > 9 else x_RD, counts_E)

    def edit(block: Any) -> None:
        experts = block.moe.routed_experts.inner_experts
        experts.__class__ = type("Users", (type(experts),), {"forward": forward})

    model, _ = _pieces(edit)
    experts: Any = model.get_submodule("layers.1.moe.routed_experts.inner_experts")
    x_RD, counts_E = torch.randn(16, D).bfloat16(), torch.tensor([2] * 8)
    with caplog.at_level("INFO"):
        outs = [experts(x_RD, counts_E) for _ in range(2)]
    assert all(torch.equal(out, forward(experts, x_RD, counts_E)) for out in outs)
    assert caplog.text.count("inner_experts is not compiled: ") == 1


class _TwoOutputs(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()


def test_nothing_has_to_read_the_gradient_of_an_output(one_rank: None):
    """Of a router under tensor parallelism, DTensors: its scores are for the balance alone."""
    two = _TwoOutputs()
    block = nn.ModuleDict({"two": two})
    part = CompiledPart(block, "block", {"two": two}, "two", is_piece=True)
    part.compile(backend="aot_eager", fullgraph=True)
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(4), mesh).requires_grad_()
    for _ in range(2):
        first, _ = two(x)
        grad: Any = torch.autograd.grad(first.sum(), x)[0]
        assert torch.equal(grad.to_local(), cast(Any, x.detach().cos()).to_local())


class _NoAC(ActivationCheckpointing):
    def apply(self, model: nn.Module) -> None: ...


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        pytest.param(_NoAC(SelectiveAC.Config()), 1e-9, marks=pytest.mark.slow),
        (SelectiveAC(SelectiveAC.Config()), 1e-9),
        pytest.param(FullAC(FullAC.Config()), 1e-9, marks=pytest.mark.slow),
        (FP8AC(POLICIES["speed"]), 2e-3),
    ],
)
def test_pieces_have_the_gradients_of_eager_blocks(policy: ActivationCheckpointing, most: float):
    """One graph for each: attention, feed-forward, norm, router, routed and shared experts."""
    eager = run(policy, "experts", backend=None)
    ours = isinstance(policy, FP8AC)
    pieces = compiled("speed", "experts") if ours else run(policy, "experts")
    assert pieces.graphs == 6
    assert 1 - worst_cosine(pieces, eager) < most
    assert pieces.operations["aten::_grouped_mm"] <= eager.operations["aten::_grouped_mm"]


@pytest.mark.parametrize("keeps", ["", "a hook writes to it", "a norm of the user's"])
def test_what_a_norm_returns_is_made_again(keeps: str):
    """Or kept, where that might make something else, and under hooks of the caller's.

    Gradients are the same bits.
    """
    made: list[weakref.ref] = []
    kept: list[bool] = []

    def note(module: nn.Module, inputs: Any, out: torch.Tensor) -> None:
        made.append(weakref.ref(out.untyped_storage()))
        if keeps == "a hook writes to it":
            out.mul_(2)

    def look(moment: str) -> None:
        gc.collect()
        kept.append(made[-1]() is not None if made else False)

    def edit(block: nn.Module) -> None:
        norm = block.get_submodule("ffn_norm")
        norm.register_forward_hook(note)
        if keeps == "a norm of the user's":
            norm.__class__ = type("Users", (type(norm),), {})

    outcomes = []
    for counts in (True, False):
        policy = SelectiveAC(SelectiveAC.Config())
        with torch.compiler.set_stance("force_eager" if keeps else "default"):  # as in a plan
            outcomes.append(run(policy, "experts", counts=counts, at=look, edit=edit, lengths=(L,)))
    assert kept[1::3] == [True, keeps != ""]  # between forward and backward
    assert worst_cosine(*outcomes) == pytest.approx(1, abs=1e-12)
    for name, grad in outcomes[0].gradients.items():
        assert torch.equal(grad, outcomes[1].gradients[name]), name


def test_an_input_that_is_written_to_makes_nothing_again():
    """Where the norm keeps it in float8, autograd would not say so."""
    norm = RMSNorm.Config(normalized_shape=D).build()
    region = _Region(CompiledPart(nn.Module(), "layers.1", {"norm": norm}, "norm"), norm, norm)
    x = torch.randn(B, L, D)
    out = region(x)
    with _Remade(region, x, out._version).in_place_of(out):
        squared = out * torch.ones_like(out).requires_grad_()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"layers.1.norm: its input was modified in place"):
        squared.sum().backward()


@pytest.mark.slow
def test_a_second_start_compiles_nothing(caplog: pytest.LogCaptureFixture):
    """Inductor's cache takes what stores in float8: its key holds the partitioner."""

    def start() -> tuple[torch.Tensor, Counter[str]]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 256)).bfloat16()
        part = CompiledPart(block, "block", {"": block}, "")
        call = functools.partial(compiled_checkpoint(part, FP8AC(FP8AC.Config())), block)
        # Each start has a report of its own, which no key can hold.
        partitioner = Float8Partitioner(Codec(), report=lambda saved: None)
        compiled = torch.compile(call, **compile_arguments(partitioner, "inductor"))
        x = torch.randn(256, 256).bfloat16().requires_grad_()
        compiled(x).float().square().sum().backward()
        assert x.grad is not None
        return x.grad, Counter(counters["inductor"])

    with fresh_cache():
        first, second = start(), start()
    assert (first[1]["fxgraph_cache_miss"], second[1]["fxgraph_cache_hit"]) == (2, 2)
    assert not second[1]["fxgraph_cache_miss"]
    assert "pickle" not in caplog.text
    assert torch.equal(first[0], second[0])


def test_a_compiled_run_that_stores_nothing_in_float8_fails():
    policy = FP8AC(FP8AC.Config())
    run(policy, "block", layers=1, lengths=(L,))
    policy.memory_report.graphs.clear()
    with pytest.raises(RuntimeError, match="stores in float8, but nothing was stored in it"):
        policy.memory_report.check_graphs()


@functools.cache
def _gradient_of_choice(
    kind: type[LooksUp], mode: Any, choice: str
) -> tuple[torch.Tensor, list[Saved]]:
    """Of the table that a block looks up, and what its graph saves."""
    torch.manual_seed(3)
    block = kind(CHOICES[choice]).bfloat16()
    x_TD = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    saved: list[list[Saved]] = []
    config = FP8AC.Config(preset="stock") if mode == "stock" else FP8AC.Config(mode=mode)
    part = CompiledPart(block, "block", {"": block}, "")
    call = functools.partial(compiled_checkpoint(part, FP8AC(config)), block)
    partitioner = Float8Partitioner(Codec(), report=saved.append)
    arguments = compile_arguments(partitioner, "inductor") | {"backend": without_kernels}
    torch.compile(call, fullgraph=True, **arguments)(x_TD).float().sum().backward()
    (graph,) = saved
    grad: Any = block.table.weight.grad
    return grad, graph


def _has_float8(graph: list[Saved]) -> bool:
    return any(each.treatment.startswith("float8") for each in graph)


@pytest.mark.parametrize(
    ("kind", "mode", "choice"),
    [
        *((LooksUp, "selective", "argmax"), (LooksUp, "selective", "gate")),
        *((LooksUp, "full", "argmax"), (LooksUp, "no_recompute", "argmax")),
        (ChecksItself, "full", "argmax"),
    ],
)
def test_a_choice_is_kept(kind: type[LooksUp], mode: Any, choice: str):
    """Where nothing is recomputed, too: the min-cut would make it again from what is in float8.

    So would a checkpoint of the block's own, which asks no policy of ours.
    """

    exact, of_stock = _gradient_of_choice(kind, "stock", choice)
    kept, ours = _gradient_of_choice(kind, mode, choice)
    assert _has_float8(ours)
    assert not _has_float8(of_stock)
    assert torch.equal(exact, kept)
    if kind is ChecksItself:  # nothing is rounded, so its checkpoint may choose again
        assert torch.int64 not in {each.dtype for each in of_stock}


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(SelectiveAC(SelectiveAC.Config()), marks=pytest.mark.slow),
        FullAC(FullAC.Config()),
    ],
)
def test_the_load_of_experts_is_counted_once(policy: ActivationCheckpointing):
    """And not halved: Titan does that to blocks that are wrapped, for their recompute."""
    model = debug_model(layers=2)
    units = plan_units(model, "block")
    names = [name for name, _ in model.named_parameters()]
    checkpoint_blocks(model, policy, units, compiled=True)
    block: Any = model.layers["1"]
    block.compile(backend="aot_eager", fullgraph=True)
    x_BLD = torch.randn(B, L, D).bfloat16().requires_grad_()
    block(x_BLD, None, None).float().sum().backward()
    halves = getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT
    assert block.moe.tokens_per_expert_E.sum() // (2 if halves else 1) == 3 * TOKENS
    assert [name for name, _ in model.named_parameters()] == names
