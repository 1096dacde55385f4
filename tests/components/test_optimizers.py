"""Parameter groups, Titan's hybrid of Muon and AdamW, and their states under our wrapping.

That both train as under stock TorchTitan is in the matrix (``Run.optimizer``).
"""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer as TitanOptimizersContainer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.helpers import muon
from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, make_config, titan_config
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.compile import checkpoint_blocks, compile_units
from titan_ext.base.stdlib_corpus import make_corpus
from titan_ext.components.optim import OptimizersContainer
from titan_ext.fsdp.units import plan_units
from titan_ext.run.trainer import extend_config

# Anchored as users write them: a wrapper's segment in a name would change who takes it.
GROUPS = [
    ParamGroupConfig(pattern=r"norm\.weight$", optimizer_name="AdamW", optimizer_kwargs={"lr": 1}),
    ParamGroupConfig(
        pattern=r"^layers\.\d+\.(attention|attn)\.", optimizer_name="Adam", optimizer_kwargs={}
    ),
    ParamGroupConfig(
        pattern=r"^layers\.[12]\.moe\.routed_experts\.inner_experts\.w2",
        optimizer_name="AdamW",
        optimizer_kwargs={"weight_decay": 0.0},
    ),
    ParamGroupConfig(pattern=r"^tok_embeddings", optimizer_name="AdamW", optimizer_kwargs={}),
    ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 2}),
]
POLICIES: dict[str, Any] = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
    "fp8": FP8AC.Config(),
}


def _model() -> Any:
    spec = titan_config("deepseek_v3").model_spec
    assert spec is not None
    with torch.device("meta"):
        return spec.model.build()


def _resolved(container: TitanOptimizersContainer) -> list[dict[str, Any]]:
    """Groups with their names and hyperparameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for optimizer in container
        for group in optimizer.param_groups
    ]


@pytest.fixture(scope="module")
def bare() -> list[dict[str, Any]]:
    """What stock TorchTitan makes of a model that nothing is wrapped in."""
    config = TitanOptimizersContainer.Config(param_groups=GROUPS)
    return _resolved(config.build(model_parts=[_model()]))


@pytest.mark.parametrize(
    ("policy", "wrap", "compiled"),
    [
        ("none", "submodule", True),
        ("selective", "submodule", False),
        ("full", "block", True),
        ("fp8", "block", False),
        ("fp8", "submodule", True),
    ],
)
def test_groups_do_not_depend_on_what_is_wrapped(
    policy: str, wrap: Any, compiled: bool, bare: list[dict[str, Any]], tmp_path: Path
):
    model = _model()
    units = plan_units(model, wrap)
    if POLICIES[policy] is not None:
        built = POLICIES[policy].build(dump_folder=str(tmp_path))
        checkpoint_blocks(model, built, units, compiled=compiled)
    if compiled:
        dims: Any = SimpleNamespace(tp_enabled=False, ep_enabled=True)
        compile_units(model, units, CompileConfig(enable=True), dims)
    config = OptimizersContainer.Config(param_groups=GROUPS)
    assert _resolved(config.build(model_parts=[model])) == bare
    assert [len(group["param_names"]) for group in bare] == [19, 2, 1, 37, 24]


def test_stages_of_a_pipeline_share_the_groups(
    bare: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
):
    """Each stage takes what it has of a group; here the first has embeddings, the other has not."""
    first, last = _model(), _model()
    last.tok_embeddings = None
    first.layers = nn.ModuleDict({k: v for k, v in first.layers.items() if k in "01"})
    last.layers = nn.ModuleDict({k: v for k, v in last.layers.items() if k not in "01"})
    first.norm = first.lm_head = None
    stages = OptimizersContainer.Config(param_groups=GROUPS)
    groups = [
        group for stage in (first, last) for group in _resolved(stages.build(model_parts=[stage]))
    ]
    for whole in bare:
        names = whole.pop("param_names")
        parts = [
            g["param_names"]
            for g in groups
            if {**g, "param_names": 0} == {**whole, "param_names": 0}
        ]
        assert sorted(name for part in parts for name in part) == sorted(names)
    assert "pattern '^tok_embeddings' takes no parameter of the model parts" in caplog.text


def test_a_container_of_ones_own_is_left_alone():
    class Mine(TitanOptimizersContainer):
        from dataclasses import dataclass

        @dataclass(kw_only=True, slots=True)
        class Config(TitanOptimizersContainer.Config):
            pass

    config = titan_config("deepseek_v3")
    mine = config.optimizer = Mine.Config(param_groups=GROUPS)
    assert extend_config(config).optimizer is mine
    config.optimizer = OptimizersContainer.Config(param_groups=GROUPS)
    ours = config.optimizer
    assert extend_config(config).optimizer is ours
    assert type(extend_config(titan_config("deepseek_v3")).optimizer) is OptimizersContainer.Config


SAVED = Run(world=2, ep=2, parallelize="submodule", layers=2, seq_len=32, optimizer="muon", steps=2)


def _states(run: Run, folder: Path) -> dict[str, Any]:
    """Train or resume to step 2; parameters and optimizer states as full tensors, from rank 0."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torchtitan.tools.logging import init_logger

    init_logger()
    config: Any = make_config(run, folder)
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=2,
        last_save_model_only=False,
        exclude_from_loading=["dataloader"],  # Titan has a data position by rank
    )
    with muon.on_a_cpu():
        trainer = config.build()
        trainer.train()
        tensors = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in trainer.optimizers.state_dict().items()
        }
        (model,) = trainer.model_parts
        tensors |= {name: param.full_tensor() for name, param in model.named_parameters()}
        tensors |= {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.named_buffers()
            if name.endswith("expert_bias_E")
        }
    trainer.close()
    if dist.get_rank():
        return {}
    return {
        name: value.detach().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in tensors.items()
    }


def _unwrapped(states: dict[str, Any]) -> dict[str, Any]:
    return {re.sub(r"_checkpoint_wrapped_module\.", "", name): v for name, v in states.items()}


@pytest.mark.slow
def test_states_of_muon_and_fused_adamw_survive_a_change_of_world_size(tmp_path: Path):
    make_corpus()
    layouts = [
        SAVED,
        replace(SAVED, world=4, ep=4, backend="partial_dtensor"),
        replace(SAVED, world=1, ep=1, parallelize="block", ac="full"),
    ]
    saved, *loaded = [
        _unwrapped(run_ranks(_states, run.world, run, tmp_path, log_folder=tmp_path / str(run))[0])
        for run in layouts
    ]
    kinds = {name.rpartition(".")[2] for name in saved if name.startswith("state.")}
    assert kinds == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert saved["param_groups.norm.weight.fused"] is True
    experts = "state.layers.1.moe.routed_experts.inner_experts.w2_EDF.momentum_buffer"
    assert saved[experts].dtype == np.float32, "whatever the dtype of the matrix products"
    assert np.abs(saved[experts]).min(axis=(1, 2)).shape == (8,)
    assert np.abs(saved["layers.1.moe.expert_bias_E"]).max() > 0, "Titan's hook has run"
    for run, states in zip(layouts[1:], loaded, strict=True):
        assert "Training starts at step 3" in (tmp_path / str(run) / "rank_0.log").read_text()
        assert states.keys() == saved.keys()
        for name, value in saved.items():
            np.testing.assert_array_equal(states[name], value, err_msg=f"{run}: {name}")
