# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that FSDP2 does not manage, which are refused, and those that nobody declared.

FSDP2 manages the parameters that a module has when ``fully_shard`` is called. One that is added
later (an adapter injected after wrapping, a new head) trains on each rank's own data. The ranks'
copies then drift apart without an error. The model's first forward refuses such parameters, in any
training loop.
"""

from collections.abc import Collection, Iterable

import spmd_types as spmd
import torch.nn as nn
from spmd_types.runtime import has_local_type
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.decoder_sharding import dense_param_placement

from titan_ext.base.messages import and_more
from titan_ext.base.titan.parallelism import mesh_with_axes
from titan_ext.fsdp.plan import plan_of
from titan_ext.fsdp.units import param_groups


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise ValueError naming the first module of ``model`` that FSDP1 wraps."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'The model'} is wrapped by FSDP1 "
                "(torch.distributed.fsdp.FullyShardedDataParallel), which titan_ext does not "
                "support; expected a module that is not wrapped: titan_ext applies FSDP2."
            )


def refuse_unmanaged_parameters(models: Iterable[nn.Module]) -> None:
    """Raise ValueError for parameters that were added after ``fully_shard``; call before a step.

    ``models`` is the model, or the chunks of it that the pipeline stages of this rank hold. One
    without FSDP2 (nothing was sharded) passes.
    """
    found = [name for model in models for name in unmanaged_parameters(model)]
    if found:
        raise ValueError(
            f"{and_more(found)}: added to the model, or replaced, after fully_shard. FSDP does not "
            "manage them, so their gradients would not be summed over the ranks. Add parameters "
            "before the model is parallelized: through its config "
            "(torchtitan.components.lora.LoRAConverter for LoRA) or before "
            "titan_ext.api.parallelize (docs/lora.md)."
        )


def unmanaged_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of ``model`` that FSDP2 should manage and does not.

    Parameters that it was told to ignore do not count, nor new ones that are frozen: they have no
    gradients to sum. Without FSDP2 there are none.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    managed, gathered = set[tuple[nn.Module, str]](), set[int]()
    for param in (param for group in param_groups(model.modules()) for param in group.fsdp_params):
        # The modules and attributes on which FSDPParam.to_sharded sets its tensors; tied ones too.
        info = param._module_info
        managed.add((info.module, info.param_name))
        managed.update(zip(info.shared_modules, info.shared_param_names, strict=True))
        # It stands in for a shard now: a pipeline schedule gathers before the first forward.
        gathered.add(id(getattr(param, "_unsharded_param", None)))
    plan = plan_of(model)
    ignored = plan.ignored if plan else ()
    found = []
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = canonical_fqn(f"{path}.{name}" if path else name)
            if (module, name) in managed:
                # Replaced: FSDP has another one.
                is_unmanaged = not isinstance(param, DTensor) and id(param) not in gathered
            else:
                is_unmanaged = param.requires_grad and full_name not in ignored
            if is_unmanaged:
                found.append(full_name)
    return found


def replicate_undeclared(
    model: nn.Module, parallel_dims: ParallelDims, ignored: Collection[str] = ()
) -> None:
    """Declare parameters that no ``sharding_config`` mentions to be equal on every rank.

    FSDP2 wants a declaration of every parameter under ``spmd_types``. Where no axis splits modules
    there is one choice; where one may, we raise ValueError. Call it before ``fully_shard``. FSDP
    leaves the parameters named in ``ignored`` alone.
    """
    for path, module in model.named_modules():
        path = canonical_fqn(path)
        params = dict(module.named_parameters(path, recurse=False))
        undeclared = [
            name for name in params if name not in ignored and not has_local_type(params[name])
        ]
        if not undeclared:
            continue
        is_routed = parallel_dims.ep_enabled and ".inner_experts." in f".{path}."
        if parallel_dims.tp_enabled or parallel_dims.cp_enabled or is_routed:
            raise ValueError(
                f"{and_more(undeclared)}: no sharding_config says how tensor, context or expert "
                "parallelism treats it; give its module one (docs/your_model.md), or use FSDP "
                "and pipelines alone."
            )
        layout = dense_param_placement(tp=spmd.R)
        with set_current_spmd_mesh(mesh_with_axes(parallel_dims, [x.value for x in layout.axes()])):
            for param in module.parameters(recurse=False):
                if not has_local_type(param):
                    spmd.assert_type(param, layout.axis_types, layout.partition_spec)
