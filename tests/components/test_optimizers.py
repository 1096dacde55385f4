"""Parameter groups under our wrapping.

That Titan's hybrid of Muon and AdamW trains as under stock TorchTitan, and that its states go on in
other layouts, is in the matrix (``Run.optimizer``).
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer as TitanOptimizersContainer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.helpers.training import meta_model, titan_config
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.compile import checkpoint_blocks, compile_units
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
    return _resolved(config.build(model_parts=[meta_model()]))


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
    model = meta_model()
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
    first, last = meta_model(), meta_model()
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
