"""When a unit's parameters are freed after its forward, to be gathered again for its backward."""

from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_ext.fsdp.units import Unit, UnitKind

__all__ = ["reshard_after_forward"]


def reshard_after_forward(unit: Unit, policy: str, pp_enabled: bool) -> bool:
    """Resolve ``parallelism.fsdp_reshard_after_forward`` for one unit.

    "default" frees after forward unless pipeline parallelism would gather again for every
    microbatch. The head is needed first in backward, so that only "always" frees it.

    Raises:
        ValueError: for an unknown policy.
    """
    frees = get_fsdp_reshard_after_forward_policy(policy, pp_enabled)
    if unit.kind in (UnitKind.HEAD, UnitKind.TIED):
        return policy == "always"
    return frees
