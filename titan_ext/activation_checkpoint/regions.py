# SPDX-License-Identifier: BSD-3-Clause
"""The presets by the regions of TorchTitan's next release, with a third answer: save in float8.

Main of October 2026 names regions of a block in model code. Its ``ActivationRematConfig`` has
``save_regions`` and ``recompute_regions``, patterns for their names (docs/remat.md, read at commit
03d9819f). A region that is saved keeps what its backward reads, one that is recomputed keeps
nothing. ``RegionPolicy`` says in addition which are kept in float8::

    policy = PRESETS["memory"]
    policy.answer("attention.wo.linear")    # OpPolicy.SAVE_FLOAT8

No TorchTitan that can be had here declares regions; ``tests/activation_checkpoint/test_regions.py``
declares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from titan_ext.activation_checkpoint.op_rules import OpPolicy
from titan_ext.activation_checkpoint.presets import Preset


@dataclass(frozen=True, kw_only=True)
class RegionPolicy:
    """What the regions of a block keep, by shell-style patterns for their names.

    Attributes:
        save_regions: Exactly.
        float8_regions: In float8, if no pattern of ``save_regions`` matches.
        recompute_regions: Nothing; a pattern here beats all others, as in Titan's config.
    """

    save_regions: tuple[str, ...] = ()
    float8_regions: tuple[str, ...] = ()
    recompute_regions: tuple[str, ...] = ()

    def answer(self, region: str) -> OpPolicy:
        """What the region of this name keeps; a name that no pattern matches keeps nothing."""
        for patterns, policy in (
            (self.recompute_regions, OpPolicy.RECOMPUTE),
            (self.save_regions, OpPolicy.SAVE),
            (self.float8_regions, OpPolicy.SAVE_FLOAT8),
        ):
            if any(fnmatchcase(region, pattern) for pattern in patterns):
                return policy
        return OpPolicy.RECOMPUTE


# What is small, or sends tokens, or cannot be rounded without harm.
_EXACT = ("*inner_attention", "*router*", "*routing_decision", "*token_dispatcher.*")
# Made again from the block's input, which is exact.
_QKV = ("attention.w[qk]*", "attention.qkv_linear*")
_ROUTED, _DENSE = ("*routed_experts.w1*",), ("*shared_experts.w[13]*", "feed_forward.w[13]*")


def _recomputing(*regions: str) -> RegionPolicy:
    return RegionPolicy(
        save_regions=_EXACT, float8_regions=("*",), recompute_regions=(*_QKV, *regions)
    )


PRESETS: Mapping[Preset, RegionPolicy] = {
    "memory": _recomputing(*_ROUTED, *_DENSE),
    "balanced": _recomputing(*_ROUTED),
    "speed": _recomputing(),
    "gemms": RegionPolicy(save_regions=_EXACT, float8_regions=("*",)),
    "stock": RegionPolicy(save_regions=("*",), recompute_regions=("*routed_experts.w13.*",)),
}
"""The presets of policy ``fp8``, as near as regions come: w1 and w3 are one region there.

``w2`` is never recomputed: what it reads is made again with ``w13`` anyhow. ``stock`` is Titan's
own ``SelectiveActivationRematConfig``.
"""
