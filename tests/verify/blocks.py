"""Blocks as users write them: what is in them is Titan's, and what stands between is not.

Each form is a config function, for ``make search`` and ``extends = "tests.verify.blocks.NAME"``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock

from titan_ext.run.trainer import extend_config

Form = Callable[[Any, torch.Tensor, Any, Any], torch.Tensor]


def _feed_forward(block: Any, x_BLD: torch.Tensor) -> torch.Tensor:
    return block.moe(x_BLD) if block.moe_enabled else block.feed_forward(x_BLD)


def _post_norm(block: Any, x_BLD: torch.Tensor, masks: Any, positions: Any) -> torch.Tensor:
    x_BLD = block.attention_norm(x_BLD + block.attention(x_BLD, masks, positions))
    return block.ffn_norm(x_BLD + _feed_forward(block, x_BLD))


def _parallel(block: Any, x_BLD: torch.Tensor, masks: Any, positions: Any) -> torch.Tensor:
    h_BLD = block.attention_norm(x_BLD)
    x_BLD = x_BLD + block.attention(h_BLD, masks, positions) + _feed_forward(block, h_BLD)
    return x_BLD + 0.1 * block.ffn_norm(x_BLD)


def _twice(block: Any, x_BLD: torch.Tensor, masks: Any, positions: Any) -> torch.Tensor:
    for share in (1.0, 0.5):
        h_BLD = block.attention_norm(x_BLD)
        x_BLD = x_BLD + share * block.attention(h_BLD, masks, positions)
        x_BLD = x_BLD + share * _feed_forward(block, block.ffn_norm(x_BLD))
    return x_BLD


def _gated(block: Any, x_BLD: torch.Tensor, masks: Any, positions: Any) -> torch.Tensor:
    h_BLD = block.attention_norm(x_BLD)
    x_BLD = x_BLD + block.attention(h_BLD, masks, positions) * h_BLD.sigmoid()
    y_BLD = _feed_forward(block, block.ffn_norm(x_BLD))
    return x_BLD + y_BLD * y_BLD.mean(-1, keepdim=True).tanh()


def _config_of(form: Form) -> Any:
    """The debug model's trainer, whose blocks have this forward."""
    parent = DeepSeekV3TransformerBlock
    fields = {"__annotations__": {}, "__module__": __name__}
    block: Any = type("Users", (parent,), {"forward": form, "__module__": __name__})
    block.Config = dataclasses.dataclass(kw_only=True, slots=True)(
        type("Config", (parent.Config,), fields)
    )
    block.Config._owner = block
    config: Any = deepseek_v3_debugmodel()
    model = config.model_spec.model
    model.layers = [
        block.Config(**{each.name: getattr(layer, each.name) for each in dataclasses.fields(layer)})
        for layer in model.layers
    ]
    return extend_config(config)


def post_norm() -> Any:
    return _config_of(_post_norm)


def parallel() -> Any:
    return _config_of(_parallel)


def twice() -> Any:
    return _config_of(_twice)


def gated() -> Any:
    return _config_of(_gated)
