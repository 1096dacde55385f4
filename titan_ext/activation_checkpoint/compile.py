# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile for the pieces that FSDP and exchanges leave whole, with checkpoints inside.

What is compiled is the forward of a module, with its SPMD boundary; its hooks, FSDP's and a user's,
run around it. With whole-block units we compile the block, as stock Titan does; with sub-module
units each module of a unit. All go through Titan's own ``apply_compile``, which sets the compiler
flags and handles FlexAttention regions. The recompile limit is raised here, too.

A block that exchanges order, or whose routed experts are an FSDP unit, is compiled in pieces
(``_pieces``): attention with its norm, the norm of the experts, the router, the inner experts, what
multiplies their outputs by scores (``make_pieces``), and the shared ones. The block's forward,
``MoE.forward`` and the token dispatcher stay eager, so halves pause there, shared experts run while
tokens travel, and counts are read by the host. What passes between pieces is kept, so that no
exchange runs again; what a norm returns is made again (``_Remade``). Policy "full" keeps the input
of the block alone: its checkpoint stays eager, around the pieces, and sends tokens again as in
eager mode.

Other blocks are compiled whole, although tokens may travel in them: that holds fewer bytes, since
nothing is kept between pieces, and equals stock's compiled blocks bit for bit.

A checkpoint around a block would see compiled code instead of matrix multiplications. It would save
nothing, and so turn selective checkpointing into full. So the checkpoint goes *inside* what is
compiled. torch.compile does not run it: it traces it, asks its policy about each operation, and
recomputes what is not saved. Then our partitioner stores in float8 what the policy asks. So eager
and compiled code share their policies, but "discard" means "recompute" here: the compiler sees the
whole backward, and recomputes only what it reads.

A checkpoint saves its inputs, and a unit of Titan's blocks is a chain: norm -> attention (-> norm).
So its main module runs the whole chain as one compiled function, and the other modules return their
inputs. A trace of the block proves the chain (``_is_chain``). Where a block reads what a norm
returns twice, or a hook does, each module is compiled and checkpointed by itself. No module of the
model is moved: parameters keep their names, FSDP its hooks, and the block its forward.

Titan's load balancing halves the token counts of blocks wrapped in a checkpoint, because an eager
recompute counts again. Compiled code does not count again, and nothing between pieces does, so only
blocks with an eager checkpoint are wrapped.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

import torch
import torch._dynamo
import torch.nn as nn
from torch import fx
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import Unsupported, UserError
from torch._guards import detect_fake_mode
from torch._higher_order_ops.effects import has_effects
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.op_effects import TO_COPY, op_name
from titan_ext.activation_checkpoint.op_policies import Resolver
from titan_ext.activation_checkpoint.op_rules import CHILDREN, OpLocation, OpPolicy, join
from titan_ext.activation_checkpoint.partition import (
    Float8Partitioner,
    add_state,
    annotation,
    compile_arguments,
)
from titan_ext.base.hooks import is_known, user_hook
from titan_ext.base.tensors import is_plain, local_tensor, parts_in, plain_tensors, wrapping
from titan_ext.components.exchange import Inside, ScoreOutputs
from titan_ext.fsdp.units import (
    BLOCK_KINDS,
    Unit,
    UnitKind,
    plan_units,
    splits_blocks,
    vision_modules,
)

# Titan's number for gpt_oss, needed until pytorch issue 187073 is closed.
_RECOMPILE_LIMIT = 12
# PREFER_SAVE is float8 to our partitioner, since torch's gives it no meaning (``partition``).
_ANSWERS = {
    OpPolicy.SAVE: CheckpointPolicy.MUST_SAVE,
    OpPolicy.SAVE_FLOAT8: CheckpointPolicy.PREFER_SAVE,
    OpPolicy.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    OpPolicy.DISCARD: CheckpointPolicy.PREFER_RECOMPUTE,
}


def compiles_model(config: CompileConfig) -> bool:
    """True if the model is compiled, not just the loss."""
    return config.enable and "model" in config.components


def checkpoint_blocks(
    model: Decoder, policy: ActivationCheckpointing, units: Sequence[Unit], *, compiled: bool
) -> None:
    """Apply ``policy`` to the transformer blocks of ``model``, split into ``units``, in place.

    And to those of its vision towers. Call it before compile and before FSDP.
    Multi-token-prediction blocks stay as they are, as in Titan.
    """
    if compiled and isinstance(policy, FP8AC):
        policy.prepare(model)
        for part in parts(model, units):
            part.checkpoint(compiled_checkpoint(part, policy))
    elif compiled and isinstance(policy, SelectiveAC):
        # For what it sets in Dynamo: a workaround for checkpoints in pipelines (pytorch 166926).
        policy.apply(_Layers({}))
        for part in parts(model, units):
            # Titan makes the checkpoint inside of this private method: we take it off the wrapper.
            wrapper = policy._wrap_block(part.main, base_fqn=part.name)
            part.checkpoint(cast(Any, wrapper).checkpoint_fn)
    else:
        policy.apply(model)
        for name, wrapper in model.layers.items():
            whole = compiled and not splits_blocks(units)
            if whole and isinstance(wrapper, CheckpointWrapper) and not in_pieces(wrapper):
                # Torch's wrapper has no public name for what it wraps.
                block = wrapper._checkpoint_wrapped_module
                model.layers.register_module(name, block)
                CompiledPart(block, f"layers.{name}", {"": block}, "").checkpoint(
                    wrapper.checkpoint_fn
                )
    for tower in vision_modules(model).values():
        if hasattr(tower, "layers"):
            policy.apply(tower)


@dataclass(frozen=True)
class CompiledPart:
    """One compiled region: a block, the modules of a sub-module unit, or a piece of a block."""

    block: nn.Module
    block_name: str
    modules: dict[str, nn.Module]
    """By name in the block, in the order in which they run; the block itself is ""."""
    child: str
    """The name in the block of the module that runs them all."""
    is_piece: bool = False
    """Whether something stays eager beside it in the block."""
    arrives: str = ""
    """The name in the block of what brings its input from other ranks; "" for a part whose input is
    this rank's own."""

    @property
    def main(self) -> nn.Module:
        """The module that runs it all: the block or, for example, its attention."""
        return self.modules[self.child]

    @property
    def name(self) -> str:
        """The name of ``main`` in the model."""
        return join(self.block_name, self.child)

    def checkpoint(self, checkpoint: Callable[..., Any] | None) -> None:
        """Let ``main`` run the whole chain, as ``checkpoint(function, *args, **kwargs)``."""
        position = list(self.modules).index(self.child)
        forwards = [module.forward for module in self.modules.values()]
        before, main_forward = forwards[:position], forwards[position]
        after = forwards[position + 1 :]

        def chain(*args: Any, **kwargs: Any) -> Any:
            for forward in before:
                args = (forward(args[0]), *args[1:])
            x = main_forward(*args, **kwargs)
            for forward in after:
                x = forward(x)
            return x

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            assert checkpoint is not None
            return checkpoint(chain, *args, **kwargs)

        forward = chain if checkpoint is None else checkpointed
        forward.__code__ = _code_of(forward.__code__, self.child)
        # On the instances, as Titan's own Module.parallelize does: FSDP's hooks stay around them.
        for module in self.modules.values():
            cast(Any, module).forward = functools.partial(_pass_through, self)
        cast(Any, self.main).forward = _Region(self, chain, forward)

    def compile(self, **arguments: Any) -> None:
        """Compile what ``main`` runs; the arguments are those of ``torch.compile``."""
        if not isinstance(self.main.forward, _Region):
            self.checkpoint(None)
        cast(Any, self.main.forward).compile(**arguments)

    def stays_eager(self) -> str:
        """The reason why a piece is not compiled; "" if it is."""
        inside = [m for top in self.modules.values() for m in top.modules() if m is not top]
        if hasattr(self.main, "send_scores") and self.arrives:
            return "it exchanges routing scores (activation_checkpoint.score_before_last_gemm)"
        return next(filter(None, map(user_hook, inside)), "")


@functools.cache
def _code_of(code: CodeType, part: str) -> CodeType:
    """Code of its own for each kind of part.

    Dynamo keeps what it compiled, and which sizes vary, by code: sizes of another part would count
    as other sizes of this one.
    """
    return code.replace(co_name=part.replace(".", "_") or code.co_name)


class _Region:
    """The forward of the main module of ``part``: eager, or compiled."""

    def __init__(
        self, part: CompiledPart, chain: Callable[..., Any], forward: Callable[..., Any]
    ) -> None:
        self.part, self._chain, self._forward = part, chain, forward
        self._is_checked = False
        # A user's own may draw, or count its calls.
        self._is_norm = part.is_piece and isinstance(part.main, nn.RMSNorm) and is_known(part.main)

    def compile(self, **arguments: Any) -> None:
        self._forward = torch.compile(self._forward, **arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        remade = getattr(args[0], "_remade", None) if args and self.part.is_piece else None
        with remade.in_place_of(args[0]) if remade else contextlib.nullcontext():
            out = self._run(*args, **kwargs)
        if self._is_norm and len(args) == 1 and not kwargs and is_plain(out):
            x = args[0].detach().requires_grad_(args[0].requires_grad)
            out._remade = _Remade(self, x, out._version)
        is_several = type(out) is tuple and any(isinstance(x, DTensor) for x in out)
        return _Outputs.apply(*out) if is_several else out

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        part = self.part
        if part.arrives and not isinstance(part.main, ScoreOutputs):
            # A rank may get no row, or one: as a known size each of them would be compiled apart.
            # As many come back as were sent.
            for x in (*args[:1], *kwargs.values()):
                if isinstance(x, torch.Tensor) and x.is_floating_point():  # not the counts
                    mark_unbacked(x, 0, shape_id=part.arrives)
        if self._is_checked or not part.is_piece:
            return self._forward(*args, **kwargs)
        # Once, when it first runs: a user's hooks come after the model is parallelized.
        why = part.stays_eager()
        try:
            return self._chain(*args, **kwargs) if why else self._forward(*args, **kwargs)
        except (Unsupported, UserError) as error:  # before anything ran
            why = str(error).partition("\n")[0]
            return self._chain(*args, **kwargs)
        finally:
            self._is_checked = True
            if why:
                # With all that autograd saves: a checkpoint would run again what communicates.
                self._forward = self._chain
                logger.info(f"{part.name} is not compiled: {why}.")


class _Remade:
    """What the piece of a norm returns: backward makes it again from what the norm has kept.

    The router and the shared experts would keep it else, all of the layer's tokens.
    """

    def __init__(self, region: _Region, x: torch.Tensor, version: int) -> None:
        self._region, self._x, self._before = region, x, x._version
        self._version = version

    def _value(self) -> torch.Tensor:
        if self._x._version != self._before:  # as autograd says of what it keeps
            raise RuntimeError(f"{self._region.part.name}: its input was modified in place.")
        with torch.enable_grad():  # by the graph of forward
            return self._region._run(self._x).detach()

    @contextlib.contextmanager
    def in_place_of(self, out: torch.Tensor) -> Iterator[None]:
        """Keep nothing of ``out`` for the backward of what runs inside."""
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if out._version != self._version or has_hooks:  # written to; or ours would hide those
            yield
            return
        storage = out.untyped_storage()._cdata

        def pack(saved: torch.Tensor) -> Any:
            if not is_plain(saved) or saved.untyped_storage()._cdata != storage:
                return saved
            return saved.size(), saved.stride(), saved.storage_offset()

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else self._value().as_strided(*packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _Outputs(torch.autograd.Function):
    """What a region returns; nothing may read the gradient of some of it (the router's scores).

    Autograd has plain zeros for that, where AOTAutograd (torch 2.15) insists on a DTensor.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.zeros = [_zeros_like(x) for x in outputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        pairs = zip(ctx.zeros, grads, strict=True)
        return tuple(zeros() if grad is None else grad for zeros, grad in pairs)


def _zeros_like(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes zeros of the kind of ``x``; it holds no tensor."""
    local, wrap = local_tensor(x), wrapping(x)
    shape, dtype, device = local.shape, local.dtype, local.device
    return lambda: wrap(torch.zeros(shape, dtype=dtype, device=device))


def _pass_through(part: CompiledPart, x: Any) -> Any:
    """The forward of a module that ``part`` runs elsewhere: it returns its input."""
    modules = part.modules.values()
    hook = next(filter(None, map(user_hook, modules)), "")
    if hook or any(m._backward_hooks or m._backward_pre_hooks for m in modules):
        raise ValueError(
            f"{part.block_name}: {hook or 'a backward hook'} was added after the model was "
            f"parallelized, and {' and '.join(part.modules)} are compiled as one: it would see "
            "other tensors. Expected to be added before, or compile.enable = false."
        )
    return x


def parts(model: Decoder, units: Sequence[Unit]) -> Iterator[CompiledPart]:
    """The parts of the transformer blocks of ``model`` that are compiled, in forward order."""
    split = plan_units(model, "submodule")
    for key, wrapped in model.layers.items():
        block = cast(nn.Module, getattr(wrapped, "_checkpoint_wrapped_module", wrapped))
        name, pieces = f"layers.{key}", in_pieces(wrapped, units)
        names = {wrapped: "", block: ""} | {child: name for name, child in block.named_children()}
        for unit in split if pieces else units:
            if unit.kind not in BLOCK_KINDS or unit.block != name:
                continue
            modules = {names[module]: module for module in unit.modules(model)}
            travels = pieces and any(map(_dispatches, modules.values()))
            if not travels and _is_chain(block, modules):
                child = next(name for name in modules if name in ("", *CHILDREN))
                yield CompiledPart(block, name, modules, child, is_piece=pieces)
                continue
            for child, module in modules.items():
                found = _pieces(child, module) if pieces else [(child, module, "")]
                for piece, part, arrives in found:
                    yield CompiledPart(block, name, {piece: part}, piece, pieces, arrives)


def make_pieces(model: Decoder, units: Sequence[Unit]) -> None:
    """Give blocks that will be compiled in pieces a module for what their dispatcher computes.

    Call it after expert parallelism and what orders exchanges.
    """
    for block in model.layers.values():
        for module in list(block.modules()) if in_pieces(block, units) else ():
            dispatcher: Any = getattr(module, "token_dispatcher", None)
            if hasattr(dispatcher, "score_outputs"):
                dispatcher.score_outputs = ScoreOutputs()
                module.add_module("score_outputs", dispatcher.score_outputs)


def pieces_in(block: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``block`` that run its pieces, by name; none if it is compiled as a whole."""
    found = {name: m for name, m in block.named_modules() if isinstance(m.forward, _Region)}
    return {name: m for name, m in found.items() if cast(_Region, m.forward).part.is_piece}


def in_pieces(block: nn.Module, units: Sequence[Unit] = ()) -> bool:
    """True if exchanges order ``block``, or ``units`` gather its routed experts by themselves."""
    gathers = any(unit.kind is UnitKind.EXPERTS for unit in units)
    dispatchers = (getattr(m, "token_dispatcher", None) for m in block.modules())
    return any(d and (gathers or getattr(d, "orders_block", False)) for d in dispatchers)


def _dispatches(module: nn.Module) -> bool:
    return any(hasattr(inside, "token_dispatcher") for inside in module.modules())


def _pieces(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The largest modules of ``module`` in which no token travels, and what brings their input."""
    if not _dispatches(module):
        yield name, module, ""
        return
    for child_name, child in module.named_children():
        if isinstance(child, Inside):  # a name for what the dispatcher does
            continue
        travels = isinstance(child, (GroupedExperts, ScoreOutputs))
        of_experts = hasattr(module, "token_dispatcher") and travels
        for piece, part, arrives in _pieces(join(name, child_name), child):
            yield piece, part, name if of_experts else arrives


def _is_chain(block: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    """True if ``block`` gives what each of ``modules`` returns to the next one, and to no other."""
    if len(modules) == 1:
        return True
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if any(getattr(module, name) for module in modules.values() for name in hooks):
        return False
    if "forward" in vars(block):  # a user's, or around an SPMD boundary: fx takes the class's
        return False
    try:
        graph = _Calls().trace(block)
    except Exception:  # where fx cannot follow, a block raises whatever it makes of that
        return False
    calls = [node for node in graph.nodes if node.target in modules]
    if [call.target for call in calls] != list(modules):
        return False
    for before, after in itertools.pairwise(calls):
        reads = [node for user in before.users for node in _inputs(user) if node is before]
        if reads != [before] or after.args[:1] != (before,):
            return False
    return True


class _Calls(fx.Tracer):
    """Traces what a block does with its children, which stay calls."""

    proxy_buffer_attributes = True  # else a block would count what is traced

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Nodes in the arguments of ``node``, each as often as it is there."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def compiled_checkpoint(part: CompiledPart, fp8: FP8AC) -> Callable[..., Any]:
    """A checkpoint for ``part``, to be called with a function that runs it and its arguments.

    Where no compiler traces it, as in a dry run, it keeps the same by ``fp8``'s eager policy.
    """
    policies = fp8.compiled_policies(part.block, part.block_name)
    # Compiled code is shared between blocks. Dynamo (2.15) does not look at a checkpoint's policy
    # to tell whether it may be; it does look at constants that the traced function uses.
    inputs = Resolver(policies, fp8.used_rules).resolve_input(part.arrives)
    names = [
        join(top, canonical_fqn(name))
        for top, module in part.modules.items()
        for name, _ in module.named_modules()
    ]
    notes = annotation(inputs, policies.key(names), recompute=policies.recipe.base != "autograd")

    @functools.cache
    def eager() -> Callable[..., Any]:
        return fp8.eager(part.block, policies, part.child, part.arrives)

    def context_fn() -> Any:
        locator = TracedOpLocator(part.modules, part.child)
        resolver = Resolver(policies, fp8.used_rules)

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            location = locator.locate(func, args, ctx.op_output)
            answer = _ANSWERS[resolver.resolve(location, ctx, func, args, kwargs, ctx.op_output)]
            # What a checkpoint inside of this one recomputes is preferred (``partition``). Torch
            # refuses "must" for operations with side effects.
            is_soft = answer is CheckpointPolicy.PREFER_RECOMPUTE and not has_effects(func)
            return CheckpointPolicy.MUST_RECOMPUTE if is_soft else answer

        return create_selective_checkpoint_contexts(policy)

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return eager()(function, *args, **kwargs)
        with fx_traceback.annotate(notes):
            return checkpoint(
                function,
                *args,
                use_reentrant=False,
                context_fn=context_fn,
                early_stop=False,
                **kwargs,
            )

    return call


class TracedOpLocator:
    """Names the operations of ``modules`` while they are traced; what is in none is ``root``'s."""

    def __init__(self, modules: Mapping[str, nn.Module], root: str) -> None:
        self._root = root
        self._modules = {
            str(id(module)): join(top, canonical_fqn(name))
            for top, part in modules.items()
            for name, module in part.named_modules()
        }
        self._operands = {
            storage: join(top, canonical_fqn(name))
            for top, part in modules.items()
            for name, param in part.named_parameters()
            for storage in _stand_ins(param)
        }
        buffers = [s for part in modules.values() for b in part.buffers() for s in _stand_ins(b)]
        add_state(_fake_mode(), [*self._operands, *buffers])

    def locate(self, func: Any, args: tuple[Any, ...], out: Any) -> OpLocation:
        operand = next(filter(None, map(self._operands.get, _storages(args))), "")
        if operand and func is TO_COPY:
            # The parameter in another dtype is still the parameter.
            self._operands |= dict.fromkeys(_storages(out), operand)
        module = self._module()
        return OpLocation(module, op_name(func), operand.removeprefix(module).lstrip("."))

    def _module(self) -> str:
        # Dynamo writes the ids of the modules that it is in, from the outermost, on every node.
        stack = fx_traceback.get_current_meta().get("nn_module_stack", {})
        return next(
            (self._modules[key] for key in reversed(stack) if key in self._modules), self._root
        )


def _stand_ins(param: torch.Tensor) -> Iterator[int]:
    for part in plain_tensors(param):
        # The tracer has met the parameter before: this is the same fake tensor, not a new one.
        yield _fake_mode().from_tensor(part).untyped_storage()._cdata


def _fake_mode() -> FakeTensorMode:
    mode = detect_fake_mode()
    assert mode is not None, "a traced location is asked for outside of torch.compile"
    return mode


def _storages(values: Any) -> Iterator[int]:
    for part in parts_in(values):
        # AOTAutograd wraps what it traces, to take writes out of it; the fake tensor is inside.
        if isinstance(part, FunctionalTensor):
            part = torch._from_functional_tensor(part.elem)
        yield part.untyped_storage()._cdata


def compile_units(
    model: Decoder,
    units: Sequence[Unit],
    compile_config: CompileConfig,
    parallel_dims: ParallelDims,
    policy: ActivationCheckpointing | None = None,
) -> None:
    """Compile the blocks of ``model``, or the modules of ``units`` that split them, in place.

    Multi-token-prediction blocks stay eager, as in stock Titan. Activation checkpointing has been
    applied; ``policy`` did it. Raises ValueError if the policy stores in float8, and the compiler
    backend cannot do that.
    """
    more: dict[str, Any] = {}
    if isinstance(policy, FP8AC):
        partitioner = Float8Partitioner(policy.codec, report=policy.memory_report.add_graph)
        more = compile_arguments(partitioner, compile_config.backend)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        # A block may be compiled once while its inputs are still in flight (AsyncCollectiveTensor)
        # and again for plain tensors. Models that alternate kinds of attention need twice that.
        # From torchtitan/models/gpt_oss/parallelize.py, for every decoder.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILE_LIMIT)
    stacks = [list(parts(model, units))]
    for name, tower in vision_modules(model).items():
        if hasattr(tower, "layers"):
            blocks = cast(nn.ModuleDict, tower.layers).items()
            stacks.append([CompiledPart(b, f"{name}.layers.{k}", {"": b}, "") for k, b in blocks])
    for found in stacks:
        layers = {part.name.replace(".", "/"): _Layer(part, more) for part in found}
        apply_compile(_Layers(layers), compile_config=compile_config, parallel_dims=parallel_dims)


class _Layer(nn.Module):
    """A part as Titan's ``apply_compile`` sees it: the modules of a layer, and its ``compile``."""

    def __init__(self, part: CompiledPart, more: Mapping[str, Any]) -> None:
        super().__init__()
        self.main = part.main
        self._part, self._more = part, more

    def compile(self, **arguments: Any) -> None:  # type: ignore[override]
        self._part.compile(**{**arguments, **self._more})


class _Layers(nn.Module):
    """Modules under the name where Titan looks for blocks."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
