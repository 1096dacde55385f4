"""Real activations: what the blocks of the DeepSeek-V3 debug model save, after a few steps."""

import contextlib
import copy
import functools
import inspect
from typing import cast

import torch
import torch.nn as nn
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder

from tests.helpers.converters import convert
from tests.helpers.training import titan_config
from titan_ext.components.dispatch import replace_configs

STEPS = 3


def debug_model(
    layers: int = 3, converters: tuple[str, ...] = (), name: str = "deepseek_v3"
) -> Decoder:
    """In bf16, initialised, on one process; ``converters`` as in ``tests.helpers.converters``."""
    model, random_state = _debug_model(layers, converters, name)
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@functools.lru_cache(4)
def _debug_model(
    layers: int, converters: tuple[str, ...], name: str
) -> tuple[Decoder, torch.Tensor]:
    """With the state that random numbers have after it."""
    spec = titan_config(name).model_spec
    assert spec is not None
    replace_configs(spec, FlexAttention.Config, lambda _: ScaledDotProductAttention.Config())
    config = cast(Decoder.Config, convert(spec.model, converters))
    config.layers = config.layers[:layers]
    torch.manual_seed(0)
    model = cast(Decoder, config.build())
    model.init_weights()
    for param in model.parameters():  # the rotary cache stays complex
        param.data = param.data.bfloat16()
    return model, torch.get_rng_state()


def tokens(batch: int = 2, seq_len: int = 64) -> torch.Tensor:
    """Python source, byte by byte."""
    text = inspect.getsource(inspect).encode()
    return torch.tensor(list(text[: batch * seq_len])).reshape(batch, seq_len)


def block_activations() -> dict[str, torch.Tensor]:
    """What autograd saves in the MoE blocks at the last of a few training steps.

    Every tensor of a storage of its own that is bf16 and no parameter, by block and order.
    """
    model, inputs = debug_model(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved: dict[int, tuple[str, torch.Tensor]] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        storage = x.untyped_storage()._cdata
        if x.dtype == torch.bfloat16 and x.numel() >= 4096 and storage not in weights:
            name = f"{current}.{len(saved):02} {list(x.shape)}"
            saved.setdefault(storage, (name, x.detach().clone()))
            kept_alive.append(x)  # so that no other tensor gets its storage's address
        return x

    for _ in range(STEPS):
        saved.clear()
        kept_alive: list[torch.Tensor] = []
        h = model.tok_embeddings(inputs)
        for current, block in model.layers.items():
            watched = current != "0"  # block 0 is dense
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
            with hooks if watched else contextlib.nullcontext():
                h = block(h, None, None)
        logits = model.lm_head(model.norm(h)).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(saved.values())
