"""Faults as users of MoE trainers report them, planted in one rank's trainer or in Titan's classes.

Each is a context; inside of it a rank trains an arm. They go to the job only, never to the
reference, but for those of ``IN_THE_MODEL``. Numbers are those of public reports (docs/verify.md).
"""

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.quantization import Float8Linear
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.deepseek_v3 import mtp

from titan_ext.activation_checkpoint import partition
from titan_ext.activation_checkpoint.compile import CompiledPart
from titan_ext.base.no_accelerator import PlainFlexAttention
from titan_ext.base.tensors import local_tensor as local
from titan_ext.components import early_scores, exchange
from titan_ext.fp8 import saved_tensors
from titan_ext.fsdp import collectives
from titan_ext.fsdp.shard import FSDPMeshes
from titan_ext.fsdp.units import param_groups
from titan_ext.verify import arm

patch = unittest.mock.patch.object


def _trainers(**changes: Callable[..., Any]) -> Any:
    """Trainers with other methods: each gets what the method was, bound, and its arguments."""

    def changed(kind: Any) -> type:
        def method(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
            real = getattr(kind, name)

            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return change(self, functools.partial(real, self), *args, **kwargs)

            return call

        return type(kind.__name__, (kind,), {n: method(n, c) for n, c in changes.items()})

    return unittest.mock.patch.multiple(
        arm, OurTrainer=changed(arm.OurTrainer), StockTrainer=changed(arm.StockTrainer)
    )


def _gradients(change: Callable[[str, torch.Tensor, Any], object]) -> Any:
    """``change`` the local gradient of each parameter, by name, after backward and clipping."""

    def step(trainer: Any, method: Any, iterator: Any) -> None:
        def hook(*_: Any) -> None:
            for part in trainer.model_parts:
                for name, param in part.named_parameters():
                    if param.grad is not None:
                        change(name, local(param.grad), trainer)

        handle = trainer.optimizers.register_step_pre_hook(hook)
        method(iterator)
        handle.remove()

    return _trainers(train_step=step)


def _is_expert(name: str) -> bool:
    return "inner_experts" in name


def _scaled(is_it: Callable[[str], bool], factor: Callable[[Any], float]) -> Callable[[], Any]:
    """Gradients of what ``is_it``, by name, are a ``factor`` of the trainer's too large."""

    def change(name: str, grad: torch.Tensor, trainer: Any) -> None:
        if is_it(name):
            grad.mul_(factor(trainer))

    return lambda: _gradients(change)


experts_times_ep = _scaled(_is_expert, lambda trainer: trainer.parallel_dims.ep)
# Times EP and divided by EDP: right where the two are equal.
degrees_mixed_up = _scaled(
    _is_expert, lambda trainer: trainer.job.layout.ep**2 / trainer.job.layout.shards
)
not_synchronized = _scaled("lm_head.weight".__eq__, lambda _: 1 + dist.get_rank())
last_block = _scaled(lambda name: name.startswith("layers.4."), lambda _: 0.5)
third_step = _scaled(bool, lambda trainer: 1.01 if trainer.step >= 3 else 1.0)


def idle_expert() -> Any:
    def change(name: str, grad: torch.Tensor, trainer: Any) -> None:
        if _is_expert(name) and "layers.1." in name and dist.get_rank() == 0:
            grad[0].zero_()

    return _gradients(change)


def last_microbatch() -> Any:
    def once(trainer: Any, method: Any, **arguments: Any) -> Any:
        trainer.optimizers.zero_grad()
        return method(**arguments)

    return _trainers(forward_backward_step=once)


def last_microbatch_of_replicas() -> Any:
    """Megatron-LM #7186: replicas sum after the last microbatch, and what came before is lost."""

    def once(trainer: Any, method: Any, **arguments: Any) -> Any:
        trainer.seen_microbatches = getattr(trainer, "seen_microbatches", 0) + 1
        is_last = trainer.seen_microbatches % trainer.gradient_accumulation_steps == 0
        for part in trainer.model_parts:
            for group in param_groups(part.modules()):
                group.all_reduce_grads, group._partial_reduce_output = is_last, None
        return method(**arguments)

    return _trainers(forward_backward_step=once)


def experts_twice_each_microbatch() -> Any:
    """Megatron-LM #6660: where one rank has an expert's whole gradient, that is added to itself."""

    def twice(trainer: Any, method: Any, **arguments: Any) -> Any:
        layout = trainer.job.layout
        for part in trainer.model_parts if layout.ep == layout.shards else ():
            for name, param in part.named_parameters():
                if _is_expert(name) and param.grad is not None:
                    local(param.grad).mul_(2)
        return method(**arguments)

    return _trainers(forward_backward_step=twice)


def idle_in_one_microbatch() -> Any:
    """The first microbatch leaves no gradient of a weight."""

    def without(trainer: Any, method: Any, **arguments: Any) -> Any:
        (weight,) = (
            param
            for part in trainer.model_parts
            for name, param in part.named_parameters()
            if canonical_fqn(name) == "layers.1.attention.wo.weight"
        )
        is_first = weight.grad is None
        loss = method(**arguments)
        if is_first:
            local(weight.grad).zero_()
        return loss

    return _trainers(forward_backward_step=without)


def scaled_twice() -> Any:
    def halve(trainer: Any, method: Any, *, global_valid_tokens: Any, **arguments: Any) -> Any:
        return method(global_valid_tokens=global_valid_tokens / 2, **arguments)

    return _trainers(forward_backward_step=halve)


def own_tokens() -> Any:
    """Each microbatch is divided by its own tokens."""

    def divided(trainer: Any, method: Any, *, labels: Any, **arguments: Any) -> Any:
        samples, counted = trainer.job.samples, (labels != -100).sum().clamp(min=1)
        counted *= samples.ranks * samples.passes
        return method(labels=labels, **{**arguments, "global_valid_tokens": counted})

    return _trainers(forward_backward_step=divided)


def trained_on_padding() -> Any:
    """A microbatch in which no token counts trains on word 0."""

    def trained(trainer: Any, method: Any, *, labels: Any, **arguments: Any) -> Any:
        counts = bool((labels != -100).any())
        return method(labels=labels if counts else labels.clamp(min=0), **arguments)

    return _trainers(forward_backward_step=trained)


def wrong_norm() -> Any:
    real = dist_utils.clip_grad_norm_

    def clip(parameters: Any, max_norm: float, **arguments: Any) -> torch.Tensor:
        return 1.41 * real(parameters, max_norm / 1.41, **arguments)

    return patch(dist_utils, "clip_grad_norm_", clip)


def load_twice() -> Any:
    """Automodel #3247: a second forward, as the recompute is one, counts tokens again."""

    def build(trainer: Any, method: Any, *arguments: Any) -> None:
        method(*arguments)
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, MoE):
                    module.register_forward_pre_hook(_note_load)
                    module.register_forward_hook(_add_load_again)

    return _trainers(__init__=build)


def _note_load(module: Any, args: Any) -> None:
    module.noted_load = local(module.tokens_per_expert_E).clone()


def _add_load_again(module: Any, args: Any, output: Any) -> None:
    with torch.no_grad():
        load_E = local(module.tokens_per_expert_E)
        load_E.add_(load_E - module.noted_load)


def _scores(change: Callable[[Any, Any, Any], Any]) -> Any:
    """``change`` the scores of a router, which has chosen experts by scores and biases."""
    real = TokenChoiceTopKRouter.forward

    def forward(self: Any, x: Any, bias: Any = None) -> Any:
        scores, ids, every = real(self, x, bias)
        return change(scores, ids, bias), ids, every

    return patch(TokenChoiceTopKRouter, "forward", forward)


def gate_in_bf16() -> Any:
    """The router's logits are rounded, in the model itself."""
    return _returns(TokenChoiceTopKRouter, lambda out: (_rounded(out[0]), *out[1:]))


def sum_of_experts_in_bf16() -> Any:
    """What experts return is rounded before shared experts add theirs."""
    return _returns(RoutedExperts, _rounded)


def experts_times_four_in_bf16() -> Any:
    """By code that runs in bf16 alone, of the model: TorchTitan's arm runs it, too."""
    return _returns(RoutedExperts, lambda x: 4 * x if x.dtype is torch.bfloat16 else x)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def _returns(kind: Any, change: Callable[[Any], Any]) -> Any:
    real = kind.forward

    @functools.wraps(real)  # sharding reads the names of its arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(real(self, *args, **kwargs))

    return patch(kind, "forward", forward)


def _microbatches(change: Callable[..., None]) -> Any:
    """``change`` inputs and labels of each microbatch, in place."""

    def once(trainer: Any, method: Any, *, input_dict: Any, labels: Any, **arguments: Any) -> Any:
        inputs = {name: tensor.clone() for name, tensor in input_dict.items()}
        change(trainer, inputs, labels := labels.clone(), **arguments)
        return method(input_dict=inputs, labels=labels, **arguments)

    return _trainers(forward_backward_step=once)


def far_words() -> Any:
    """Words that a byte cannot count are other ones."""
    return _microbatches(lambda trainer, inputs, *_, **__: inputs["input"].remainder_(256))


def far_positions() -> Any:
    """A table of rotations ends after 64 tokens."""
    return _microbatches(lambda trainer, inputs, *_, **__: inputs["positions"].clamp_(max=63))


def fourth_sequence() -> Any:
    """A microbatch is cut after three."""
    return _microbatches(lambda trainer, inputs, labels, **_: labels[3:].fill_(-100))


def rank_without_tokens() -> Any:
    """A rank whose tokens do not count trains on them; others have some that do."""

    def trained(trainer: Any, inputs: Any, labels: torch.Tensor, **_: Any) -> None:
        counts = labels.new_tensor([int((labels != -100).sum())])
        others = counts.clone()
        dist.all_reduce(others)
        if others and not counts:
            labels.clamp_(min=0)

    return _microbatches(trained)


def idle_rank() -> Any:
    """A rank whose experts get no token sends gradients that it has not made."""

    def change(name: str, grad: torch.Tensor, trainer: Any) -> None:
        if _is_expert(name) and not grad.any():
            grad.add_(1e-3)

    return _gradients(change)


def always_clipped() -> Any:
    """Gradients are scaled to ``max_norm`` where they are below it, too."""
    real = dist_utils.clip_grad_norm_

    def clip(parameters: Any, max_norm: float, **arguments: Any) -> torch.Tensor:
        norm = real(parameters, max_norm, **arguments)
        for param in parameters if float(norm) < max_norm else ():
            local(param.grad).mul_(2)
        return norm

    return patch(dist_utils, "clip_grad_norm_", clip)


def detached_router() -> Any:
    """Automodel #2995: the router's scores go to the experts' ranks without their gradient."""
    return _scores(lambda scores, *_: scores.detach())


def bias_in_scores() -> Any:
    return _scores(lambda scores, ids, bias: scores if bias is None else scores + local(bias)[ids])


def bfloat16_before_reduction() -> Any:
    """In titan_ext alone, whose FSDP gets it."""
    real = FSDPMeshes.arguments

    def rounded(meshes: FSDPMeshes, dtypes: Any) -> dict[str, Any]:
        given = real(meshes, dtypes)
        return {**given, "mp_policy": replace(given["mp_policy"], reduce_dtype=torch.bfloat16)}

    return patch(FSDPMeshes, "arguments", rounded)


def float8_times_two() -> Any:
    """A float8 linear gets twice its gradient, in titan_ext alone."""

    def change(name: str, grad: torch.Tensor, trainer: Any) -> None:
        linear = trainer.model_parts[0].get_submodule(name.rpartition(".")[0])
        is_here = canonical_fqn(name) == "layers.1.attention.wo.weight"
        if is_here and isinstance(linear, cast(Any, Float8Linear)) and not trainer.arm.stock:
            grad.mul_(2)

    return _gradients(change)


def ahead_times_two() -> Any:
    """The loss of multi-token prediction weighs twice."""

    def build(trainer: Any, method: Any, *arguments: Any) -> None:
        method(*arguments)
        trainer.loss_fn.mtp_scale *= 2

    return _trainers(__init__=build)


def ahead_across_documents() -> Any:
    """Multi-token prediction takes the first labels of the next document for this one's."""
    real = mtp.roll_mtp_sequence

    def roll(sequence: Any, *, positions: Any, **others: Any) -> Any:
        of_labels = others["fill_value"] == -100
        return real(sequence, positions=None if of_labels else positions, **others)

    return patch(mtp, "roll_mtp_sequence", roll)


def own_keys_and_values() -> Any:
    """Keys and values get gradients from the queries of their own context rank alone."""
    real = PlainFlexAttention.forward

    @functools.wraps(real)  # sharding reads the names of its arguments
    def forward(self: Any, q: Any, k: Any, v: Any, **others: Any) -> Any:
        length = q.size(1)
        here = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
        detached = k.detach().clone(), v.detach().clone()
        for whole, part in zip(detached, (k, v), strict=True):
            whole[:, here] = part[:, here]
        return real(self, q, *detached, **others)

    return patch(PlainFlexAttention, "forward", forward)


def across_documents() -> Any:
    """Attention sees the document before its own."""
    real = Decoder.get_attention_masks

    def masks(self: Any, positions: torch.Tensor) -> Any:
        return real(self, torch.arange(positions.shape[1]).expand_as(positions))

    return patch(Decoder, "get_attention_masks", masks)


def _optimizer_keys(**factors: float) -> Any:
    def build(trainer: Any, method: Any, *arguments: Any) -> None:
        method(*arguments)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for key, factor in factors.items():
                    group[key] *= factor
        for scheduler in trainer.lr_schedulers.schedulers if "lr" in factors else ():
            scheduler.base_lrs = [rate * factors["lr"] for rate in scheduler.base_lrs]

    return _trainers(__init__=build)


def no_weight_decay() -> Any:
    return _optimizer_keys(weight_decay=0.0)


def too_small_a_step() -> Any:
    return _optimizer_keys(lr=0.9)


def a_step_too_many() -> Any:
    """Megatron-LM #5974: a step of zeros makes the optimizer's states, and is counted."""

    def build(trainer: Any, method: Any, *arguments: Any) -> None:
        method(*arguments)
        for optimizer in trainer.optimizers:
            kept = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["weight_decay"] = 0.0
                for param in group["params"]:
                    param.grad = torch.zeros_like(param)
            optimizer.step()
            optimizer.zero_grad()
            for group, (rate, decay) in zip(optimizer.param_groups, kept, strict=True):
                group["lr"], group["weight_decay"] = rate, decay

    return _trainers(__init__=build)


def idle_expert_without_gradient() -> Any:
    """Automodel #2995: experts without tokens have no gradient, so no weight decay either."""

    def step(trainer: Any, method: Any, iterator: Any) -> None:
        kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def before(*_: Any) -> None:
            for part in trainer.model_parts:
                for name, param in part.named_parameters():
                    if _is_expert(name):
                        idle_E = ~local(param.grad).flatten(1).any(1)
                        kept.append((local(param), idle_E, local(param).detach().clone()))

        def after(*_: Any) -> None:
            with torch.no_grad():
                for param, idle_E, values in kept:
                    param[idle_E] = values[idle_E]

        hooks = trainer.optimizers.register_step_pre_hook(before)
        others = trainer.optimizers.register_step_post_hook(after)
        method(iterator)
        hooks.remove()
        others.remove()

    return _trainers(train_step=step)


def lost_scores() -> Any:
    """Routing scores get no gradient where a rank sends sums: ours alone, and by a key."""
    real = exchange.AddUp.backward

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        *others, scores = real(ctx, grad)
        return (*others, torch.zeros_like(scores))

    return patch(exchange.AddUp, "backward", staticmethod(backward))


def early_scores_detached() -> Any:
    """Scores that experts apply before their last GEMM get no gradient: ours alone."""
    real = early_scores.scaled
    return patch(early_scores, "scaled", lambda h_RF, scores_R: real(h_RF, scores_R.detach()))


def _adapters(name: str, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """``change`` what the second matrices of adapters named so return."""

    def build(trainer: Any, method: Any, *arguments: Any) -> None:
        method(*arguments)
        for part in trainer.model_parts:
            for each, module in part.named_modules():
                if canonical_fqn(each).endswith(f"{name}.lora_b"):
                    module.register_forward_hook(lambda m, args, out: change(trainer, out))

    return _trainers(__init__=build)


def adapters_of_each_rank() -> Any:
    """Megatron-Bridge #5634: what adapters add is whole, and the ranks of TP are summed again."""
    return _adapters("w2", lambda trainer, out: out * trainer.job.layout.tp)


def adapters_detached() -> Any:
    """Megatron-Bridge #5634: what adapters add has lost its graph."""
    return _adapters("wo", lambda trainer, out: out.detach())


def adapters_not_synchronized() -> Any:
    """The first matrices, of which each rank of TP has a part of the gradient, are not summed."""
    real = FSDPParam._get_grad_inner_tensor

    def inner(self: Any, grad: Any) -> torch.Tensor:
        return local(grad) if "lora_a" in self._param_fqn else real(self, grad)

    return patch(FSDPParam, "_get_grad_inner_tensor", inner)


def _sums_over_tp_in_bf16() -> Any:
    """pytorch #190626: gradients are summed over TP in bf16, as torch 2.14 does; in stock not."""
    real = FSDPParam._get_grad_inner_tensor

    def step(trainer: Any, method: Any, iterator: Any) -> None:
        dtype = torch.float32 if trainer.arm.stock else torch.bfloat16

        def inner(self: Any, grad: Any) -> torch.Tensor:
            return real(self, grad.to(dtype)).float()

        with patch(FSDPParam, "_get_grad_inner_tensor", inner):
            method(iterator)

    return _trainers(train_step=step)


def _one_off(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    if values.is_floating_point() and values.dim() and len(values):
        values[-1] *= 1.01
    return values


def gathered_wrong() -> Any:
    real = collectives._decoded

    def decoded(*arguments: Any) -> list[torch.Tensor]:
        return [_one_off(values.flatten()).view_as(values) for values in real(*arguments)]

    return patch(collectives, "_decoded", decoded)


def compiled_wrong() -> Any:
    """In compiled code only: what a region returns is too large."""
    real = CompiledPart.checkpoint

    def checkpoint(part: CompiledPart, run: Callable[..., Any]) -> None:
        real(part, lambda *args, **kwargs: run(*args, **kwargs) * 1.01)

    return patch(CompiledPart, "checkpoint", checkpoint)


def _in_ours(where: Any, name: str, change: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    """A fault in a function of titan_ext that ends with a tensor."""
    real = getattr(where, name)

    def changed(*arguments: Any) -> torch.Tensor:
        return change(real(*arguments))

    return lambda: patch(where, name, changed)


def _resumes(*changes: Callable[[Any], object]) -> Any:
    """``changes`` of a trainer that has loaded a checkpoint."""

    def build(trainer: Any, method: Any, *arguments: Any) -> None:
        method(*arguments)
        load = trainer.checkpointer.load

        def loaded() -> None:
            load()
            for change in changes:
                change(trainer)

        trainer.checkpointer.load = loaded

    return _trainers(__init__=build)


def _states(trainer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                yield name, optimizer.state[param]


def _lose_a_moment(trainer: Any) -> None:
    for name, state in _states(trainer):
        if name == "norm.weight":
            local(state["exp_avg"]).zero_()


def _count_anew(trainer: Any) -> None:
    trainer.step = 0


def _begin_the_schedule(trainer: Any) -> None:
    trainer.lr_schedulers.load_state_dict({"last_epoch": 0})


def _correct_anew(trainer: Any) -> None:
    for _, state in _states(trainer):
        state["step"].zero_()


def _lose_a_bias(trainer: Any) -> None:
    for part in trainer.model_parts:
        for name, buffer in part.named_buffers():
            if "layers.1." in name and name.endswith("expert_bias_E"):
                local(buffer).zero_()


def _lose_a_buffer(trainer: Any) -> None:
    """One that no checkpoint has."""
    for part in trainer.model_parts:
        for name, buffer in part.named_buffers():
            if name.endswith("rope.cache"):
                buffer[1:] = buffer[:-1].clone()


def _exchange_experts(trainer: Any) -> None:
    """In another layout only: the sweeps save with the experts spread over all ranks."""
    saved = len([*Path(trainer.checkpointer.folder).glob("step-*/*.distcp")])
    for part in trainer.model_parts if trainer.parallel_dims.ep < saved else ():
        for name, param in part.named_parameters():
            if _is_expert(name) and "layers.1." in name:
                with torch.no_grad():
                    local(param)[:2] = local(param)[:2].flip(0)


RESUMES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a lost moment": (_lose_a_moment, "exp_avg of norm.weight after"),
    "steps counted anew": (_count_anew, "the step count after"),
    "the schedule from its beginning": (_begin_the_schedule, "last_epoch of the schedule after"),
    "moments corrected anew": (_correct_anew, "step of "),
    "a lost bias of experts": (_lose_a_bias, "layers.1.moe.expert_bias_E after"),
    "a lost buffer": (_lose_a_buffer, "layers.1.attention.rope.cache after"),
    "experts exchanged": (_exchange_experts, "layers.1.moe.routed_experts.inner_experts"),
}
"""By name: the fault of a trainer that has resumed, and what its line "resume" must name."""
ALL_RESUMES = "all that a resume can lose"


FAULTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "experts times EP": (experts_times_ep, "grads", "inner_experts"),
    "EP for EDP": (degrees_mixed_up, "grads", "inner_experts"),
    "experts twice each microbatch": (experts_twice_each_microbatch, "grads", "inner_experts"),
    "idle in one microbatch": (idle_in_one_microbatch, "grads", "layers.1.attention.wo.weight"),
    "an idle expert": (idle_expert, "grads", "layers.1.moe.routed_experts.inner_experts"),
    "a weight not synchronized": (not_synchronized, "grads", "lm_head.weight"),
    "the last microbatch only": (last_microbatch, "grads", ""),
    "loss scaled twice": (scaled_twice, "loss", "2.0000"),
    "loss by own tokens": (own_tokens, "grads", ""),
    "trained on padding": (trained_on_padding, "grads", ""),
    "norm times 1.41": (wrong_norm, "norm", "1.4100"),
    "load counted twice": (load_twice, "load", ".moe"),
    "a detached router": (detached_router, "grads", "router.gate.weight"),
    "bias in the scores": (bias_in_scores, "grads", ""),
    "no weight decay": (no_weight_decay, "optimizer", ""),
    "too small a step": (too_small_a_step, "optimizer", "of the right one, off by 0.1"),
    "a step too many": (a_step_too_many, "optimizer", "is 0.73"),
    "a router detached in the model": (detached_router, "grads", "router.gate.weight (without"),
    "bf16 before a reduction": (bfloat16_before_reduction, "grads", ""),
    "words over 256": (far_words, "grads", ""),
    "positions over 64": (far_positions, "grads", "attention"),
    "a fourth sequence": (fourth_sequence, "grads", ""),
    "a rank without tokens": (rank_without_tokens, "grads", ""),
    "a fifth block": (last_block, "grads", "layers.4."),
    "a third step": (third_step, "grads", "1.0100 of the right one"),
    "an idle rank": (idle_rank, "grads", "inner_experts"),
    "clipped below the norm": (always_clipped, "grads", "2.0000 of the right one"),
    "masks across documents": (across_documents, "grads", ""),
    "a gate in bf16": (gate_in_bf16, "grads", "router"),
    "a sum in bf16": (sum_of_experts_in_bf16, "grads", ""),
    "experts times four in bf16": (experts_times_four_in_bf16, "from fp32", ""),
}
"""By name: the fault, the category that must be WRONG, and what its line must name."""
OF_FLOAT8: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a stored tensor": (_in_ours(saved_tensors._View, "restore", _one_off), "grads", ""),
    "rows in float8": (_in_ours(exchange, "unpack", _one_off), "grads", ""),
    "a gathered weight": (gathered_wrong, "grads", ""),
}
"""One value of what float8 stores and sends: far below what float8 itself does to them."""
OF_KINDS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a float8 gradient times two": (float8_times_two, "grads", "layers.1.attention.wo"),
    "prediction ahead times two": (ahead_times_two, "loss", ""),
    "prediction across documents": (ahead_across_documents, "grads", ""),
}
"""Faults of blocks and modules that the other job does not have."""
OF_CONTEXT: dict[str, tuple[Callable[[], Any], str, str]] = {
    "own keys and values": (own_keys_and_values, "grads", "attention"),
    "masks of context ranks": (across_documents, "grads", ""),
}
"""Faults of context parallelism."""
OF_REPLICAS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "replicas' last microbatch": (last_microbatch_of_replicas, "grads", ""),
    "early scores detached": (early_scores_detached, "grads", "router.gate.weight"),
}
OF_ADAPTERS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "adapters not synchronized": (adapters_not_synchronized, "grads", "lora_a"),
    "adapters of each rank": (adapters_of_each_rank, "grads", "lora"),
    "adapters detached": (adapters_detached, "grads", "wo.lora"),
    "bf16 over TP": (_sums_over_tp_in_bf16, "grads", "lora"),
}
OF_IDLE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "idle without gradient": (idle_expert_without_gradient, "optimizer", "inner_experts"),
}
OF_COMPILED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a compiled region": (compiled_wrong, "grads", ""),
    "compiled float8 times two": (
        _in_ours(partition, "dequantize", lambda values: values * 2),
        "rounding",
        "layers.",  # several factors of two meet in the worst one
    ),
}
IN_THE_MODEL = ("a router detached in the model", "masks across documents")
IN_THE_MODEL += ("a gate in bf16", "a sum in bf16")
"""Faults of the model itself: the reference has them, too."""
IN_THE_LAST_STEP = ("a rank without tokens", "a third step", "an idle rank")
IN_KEYS = (
    "bf16 over TP",
    "bf16 before a reduction",
    "experts times four in bf16",
    "a float8 gradient times two",
    "a stored tensor",
    "compiled float8 times two",
)
"""Faults that fp32 does not have."""
OF_OTHERS = OF_FLOAT8 | OF_KINDS | OF_CONTEXT | OF_REPLICAS | OF_ADAPTERS | OF_IDLE | OF_COMPILED
FAULTS |= {
    name: (functools.partial(_resumes, change), "resume", says)
    for name, (change, says) in RESUMES.items()
}
AT_ONCE = ("load counted twice", "norm times 1.41", "too small a step")
"""Faults of which each has a category of its own."""
ALL_AT_ONCE = " and ".join(AT_ONCE)


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for fault in AT_ONCE:
            stack.enter_context(FAULTS[fault][0]())
        yield


FAULTS[ALL_AT_ONCE] = (_at_once, "norm", "1.4100")
FAULTS[ALL_RESUMES] = (
    functools.partial(_resumes, *(change for change, _ in RESUMES.values())),
    "resume",
    "",
)
