# SPDX-License-Identifier: BSD-3-Clause
"""What operations are and do: which values they read, write, choose or draw, and their FLOPs.

One table, for runs and for plans. ``tests/activation_checkpoint/test_discard.py`` compares it with
torch's derivatives.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from titan_ext.base.tensors import PACKED, has_values, local_tensor, tensors_in

TO_COPY = torch.ops.aten._to_copy.default
READ_NO_VALUES = frozenset(
    """
    aten._to_copy aten._unsafe_view aten.add aten.add_ aten.alias aten.as_strided aten.cat
    aten.clone aten.constant_pad_nd aten.copy_ aten.detach aten.empty_like aten.expand
    aten.flatten aten.index aten.index_put aten.index_put_ aten.index_select aten.narrow aten.neg
    aten.new_empty aten.new_zeros aten.permute aten.reshape aten.select aten.slice aten.split
    aten.split_with_sizes aten.squeeze aten.stack aten.sub aten.sub_ aten.sum aten.t
    aten.transpose aten.unsqueeze aten.view aten.view_as_complex aten.view_as_real aten.zeros_like
    _c10d_functional.all_gather_into_tensor _c10d_functional.all_reduce
    _c10d_functional.all_to_all_single _c10d_functional.reduce_scatter_tensor
    _c10d_functional._wrap_tensor_autograd _c10d_functional.wait_tensor
    titan_ext.float8_quantize torchtitan.deterministic_scatter_add
    """.split()  # noqa: SIM905  one name a line would be a page
)
"""Operations that neither read floats nor have a derivative that does: they pass them on."""
_STEPS = frozenset(
    """
    aten.bernoulli.default aten.bernoulli_.Tensor aten.binomial aten.ceil aten.ceil_ aten.copysign
    aten.copysign_ aten.div.Scalar_mode aten.div.Tensor_mode aten.div_.Scalar_mode
    aten.div_.Tensor_mode aten.eq_ aten.floor aten.floor_ aten.floor_divide aten.floor_divide_
    aten.fmod aten.fmod_ aten.frac aten.frac_ aten.ge_ aten.gt_ aten.hardshrink aten.heaviside
    aten.heaviside_ aten.histc aten.le_ aten.lt_ aten.ne_ aten.poisson aten.remainder
    aten.remainder_ aten.round aten.round_ aten.sgn aten.sgn_ aten.sign aten.sign_ aten.threshold
    aten.threshold_ aten.trunc aten.trunc_
    """.split()  # noqa: SIM905  as above
)
"""Operations that make floats of floats and jump: by name, or by overload where only that does."""
_NORM = "aten.linalg_vector_norm"
_LOOKED_UP = frozenset(
    """
    aten.amax.default aten.amin.default aten.aminmax.default aten.linalg_vector_norm.default
    aten.max.default aten.median.default aten.min.default aten.nanmedian.default
    """.split()  # noqa: SIM905  as above
)
"""Operations whose derivative may look for the result among what they were given."""
_NO_CHOICE = ("attention", "attn", "aten.native_dropout", "aten.view", "deepep.", "hybridep.")
"""In the names of operations whose integers are random, counts of rows, or the same bytes."""


@functools.cache
def op_name(func: Any) -> str:
    """``aten.mm`` for ``aten.mm.default``; higher-order operators have a name only."""
    packet = getattr(func, "overloadpacket", None)
    return str(packet) if packet is not None else str(getattr(func, "__name__", func))


def is_exchange(op: str) -> bool:
    """True if an operation is the all-to-all of tokens, or of their counts or scores."""
    return op.endswith("all_to_all_single")


def is_attention(func: Any) -> bool:
    return "attention" in op_name(func) or "attn" in op_name(func)


def makes_views(func: Any) -> bool:
    """True if an operation makes views, which torch does not let a checkpoint replace.

    Or wraps what a collective brings (torch/distributed/_functional_collectives.py): what is saved
    of it has no wrapper, and a recompute that reads that runs other operations.
    """
    is_view = getattr(func, "is_view", False)  # higher-order operators have none
    return is_view or op_name(func) == "_c10d_functional._wrap_tensor_autograd"


def fixes_routing(op: str, out: Any) -> bool:
    """True if ``out`` is always kept: the router's choice, exchanged counts and scores."""
    return op == "aten.topk" or (is_exchange(op) and (out.dim() == 1 or not has_values(out)))


def is_copy_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a ``TO_COPY`` goes to the host, as the counts of an exchange do."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu" != args[0].device.type


def chooses(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """True if an operation makes integers, booleans or steps of floats, or tells the host one.

    A rounding of what it is given may change what it makes by more than a rounding: a table is
    looked up elsewhere, a mask has another shape. What random numbers alone decide, the dtype of
    something new, and the bytes of a quantizer (any operation but torch's own) are no choices.
    """
    if isinstance(out, torch.Tensor) and out.is_floating_point():  # almost always
        return _is_step(func)
    made = tensors_in(out)
    chosen = [x.dtype for x in made if not (x.is_floating_point() or x.is_complex())]
    if not chosen and (made or not isinstance(out, (bool, int, float))):
        return False
    if not op_name(func).startswith("aten.") and set(chosen) == {torch.uint8}:
        return False
    given = tensors_in((args, kwargs))
    return any(x.is_floating_point() or x.is_complex() for x in given) and not _is_no_choice(func)


@functools.cache
def _is_step(func: Any) -> bool:
    return not _STEPS.isdisjoint((op_name(func), str(func)))


def has_no_effects(func: Any) -> bool:
    """True if, where it makes a float tensor, an operation writes, draws and chooses nothing."""
    return not (is_mutable(func) or may_draw(func) or _is_step(func))


@functools.cache
def _is_no_choice(func: Any) -> bool:
    name = op_name(func)
    return _makes_anew(func) or any(part in name for part in _NO_CHOICE)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """True if an operation draws random numbers: attention does with dropout only."""
    if not may_draw(func):
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


@functools.cache
def may_draw(func: Any) -> bool:
    """True if an operation draws random numbers with some arguments; see ``draws``."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def looks_up(func: Any, args: Any, out: Any) -> bool:
    """True if the derivative of an operation looks for its result among the values it has read.

    It finds nothing, or others, where only one of both has been rounded (derivatives.yaml:
    ``scale_grad_by_count``, ``evenly_distribute_backward``, ``linalg_vector_norm_backward``).
    """
    if not (may_look_up(func) and torch.is_grad_enabled() and makes_node(func, args, out)):
        return False
    return op_name(func) != _NORM or any(map(math.isinf, args[1:2]))  # of which order


@functools.cache
def may_look_up(func: Any) -> bool:
    """True if the derivative of an operation may look for its result; see ``looks_up``."""
    return str(func) in _LOOKED_UP


def passes_values(func: Any, args: Any, out: Any) -> bool:
    """True if an operation only passes on the values that it is given.

    Not if it makes integers or booleans of them: an index or a mask is read, by the operation that
    gets it and by its derivative. Bytes that are made of float8 or of bytes are packed rows
    (``components.exchange``).
    """
    if op_name(func) not in READ_NO_VALUES:
        return False
    made, given = tensors_in(out), tensors_in(args)
    is_packed = bool(given) and given[0].dtype in PACKED
    return all(
        x.is_floating_point() or x.is_complex() or (is_packed and x.dtype == torch.uint8)
        for x in made
    )


def makes_node(func: Any, args: Any, out: Any) -> bool:
    """True if autograd has made a node for a dispatched operation, if it is enabled."""
    return (
        not _makes_anew(func)
        and any(x.is_floating_point() for x in tensors_in(out))
        and any(x.requires_grad for x in tensors_in(args))
    )


@functools.cache
def _makes_anew(func: Any) -> bool:
    name = op_name(func).partition(".")[2]
    return name.endswith("_like") or name.startswith("new_")


@functools.cache
def is_mutable(func: Any) -> bool:
    """True if an operation writes to any of its arguments."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    return schema is not None and schema.is_mutable


def must_write(func: Any, out: Any, *, discarded: bool) -> bool:
    """True if an operation that writes to an argument must run again, whatever its policy.

    In place its output cannot be kept: the recompute would not write it. It can be discarded.
    """
    returned = (value.alias_info for value in func._schema.returns)
    if any(alias is not None and alias.is_write for alias in returned):
        return not discarded
    return discarded or not tensors_in(out)


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    if not is_mutable(func):
        return []
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return tensors_in(
        [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    )


_fused: Any = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
_fused_backward: Any = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward
ATTENTION: dict[Any, Callable[..., int]] = {
    _fused: lambda q, k, v, *_: sdpa_flop_count(q, k, v),
    _fused_backward: lambda grad, q, k, v, *_: sdpa_backward_flop_count(grad, q, k, v),
}
"""Attention as one operation, which torch's registry does not know."""


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one call on this rank, by torch's formulas; 0 for what has none."""
    packet = getattr(func, "overloadpacket", func)
    if packet is torch.ops.aten._grouped_mm:
        a, b = local_tensor(args[0]), local_tensor(args[1])
        return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]  # torch has no formula for it
    if packet in ATTENTION:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        return ATTENTION[packet](*(local_tensor(x).shape for x in tensors))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    local = tree_map_only(torch.Tensor, local_tensor, (args, kwargs or {}, out))
    return int(formula(*local[0], **local[1], out_val=local[2]))
