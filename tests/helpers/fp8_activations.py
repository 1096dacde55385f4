"""Real activations: what the blocks of the DeepSeek-V3 debug model save, after a few steps."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder

from tests.helpers.converters import convert
from tests.helpers.training import titan_config
from titan_ext.components.dispatch import replace_configs

STEPS = 3


class SavesCasts(SelectiveAC):
    """A user's policy: Titan's, and what is cast is saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.aten._to_copy.default}


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


class LooksUp(nn.Module):
    """A block that looks a table up where something computed from float8 says so."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(256, 256, bias=False) for _ in range(3))
        self.table = nn.Embedding(256, 256)
        self._choose = choose

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        h_TD = self.third(nn.functional.silu(self.second(nn.functional.silu(self.first(x_TD)))))
        picked = self._choose(h_TD)
        if picked.dtype == torch.bool:
            rows = self.table.weight[picked]
        elif picked.is_floating_point():
            rows = self.table.weight * picked.detach()
        else:
            rows = self.table(picked % 256)
        return torch.cat((rows, nn.functional.silu(h_TD)))


class ChecksItself(LooksUp):
    """A block with a checkpoint of its own around its choice."""

    use_reentrant = False

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x_TD, use_reentrant=self.use_reentrant)


CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda h: h.argmax(-1),
    "comparison": lambda h: (h > 0.02).sum(-1),
    "gate": lambda h: (h > 0.02).to(h.dtype),
    "cast": lambda h: (1000 * h[:, 0]).to(torch.int64),
    "cast to bytes": lambda h: (1000 * h[:, 0].abs()).to(torch.uint8).long(),
    "mask": lambda h: h[:256, 0] > 0.001,
    "sort": lambda h: h.sort(-1).indices[:, 7],
    "maximum": lambda h: h.max(-1).indices,
    "bounds": lambda h: torch.searchsorted(torch.linspace(-1, 1, 999), h[:, 3].float()),
    "nonzero": lambda h: h.relu().nonzero()[:, 0],
    "round": lambda h: (40 * h).round(),
    "floor": lambda h: torch.floor(40 * h),
    "division": lambda h: torch.div(h, 0.02, rounding_mode="floor"),
    "sign": lambda h: h.sign(),
    "coin": lambda h: torch.bernoulli(h.sigmoid()),
    "drawn": lambda h: torch.multinomial(h.softmax(-1).float(), 2).flatten(),
    "host": lambda h: torch.arange(int(1e7 * h.float().abs().mean().item()) % 256),
    "branch": lambda h: h.argmin(-1) if 1e5 * h.sum() % 2 > 1 else h.argmax(-1),
}
