"""Policies of every kind, for compiled code."""

from titan_ext.activation_checkpoint import FP8AC

RULES = {
    "*:aten.topk": "save",
    "*:_c10d_functional.all_to_all_single:*:1": "save",  # the counts
    "*:_c10d_functional.all_to_all_single": "save_float8",
    "attention:aten.mm": "save",
    "moe.shared_experts:aten.mm": "save_float8",
    "moe.routed_experts.inner_experts:aten._grouped_mm:w1_EFD": "save_float8",
    "moe.routed_experts.inner_experts:aten._grouped_mm:w3_EFD": "save",
    "feed_forward:aten.mm": "discard",
    "input": "save_float8",
    "*": "recompute",
}
OP_POLICIES = FP8AC.Config(preset="stock", op_policies=RULES)
EXACT = FP8AC.Config(
    preset="stock",
    op_policies={name: policy.replace("save_float8", "save") for name, policy in RULES.items()},
)
"""The same tensors, all of them exact."""
