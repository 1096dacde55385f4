# SPDX-License-Identifier: BSD-3-Clause
"""How often FSDP2 gathers the output layer with TorchTitan's chunked loss.

Two blocks, a norm and a head, sharded as ``apply_fsdp_to_decoder`` does, over a process group of 8
ranks that sends nothing. Prints the all-gathers of each unit in two steps, with norm and head in
one unit and with a unit each.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.loss import ChunkedLossWrapper


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.RMSNorm(64)
        self.lm_head = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def gathers_of_steps(one_unit: bool) -> list[dict[str, int]]:
    """All-gathers of each unit in a first and a second step."""
    model = Decoder()
    mesh = init_device_mesh("cpu", (8,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    last: list[nn.Module] = [model.norm, model.lm_head]
    units = [last] if one_unit else [[module] for module in last]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    groups = {
        group: name
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    }
    counts: Counter[str] = Counter()
    for group, name in groups.items():
        group._all_gather_comm = Counting(group._all_gather_comm, name, counts)
    loss = ChunkedLossWrapper.Config().build()
    loss.set_lm_head(model.lm_head)
    found = []
    for _ in range(2):
        counts.clear()
        hidden = model(torch.randn(1, 64, 64))
        labels = torch.randint(512, (1, 64))
        loss(hidden, labels, torch.tensor(64.0))[0].backward()
        found.append(dict(counts))
    return found


class Counting(AllGather):
    """The all-gather of a parameter group, which counts its calls under ``name``."""

    def __init__(self, gather: Any, name: str, counts: Counter[str]) -> None:
        self._gather, self._name, self._counts = gather, name, counts

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._gather.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._counts[self._name] += 1
        return self._gather(*args, **kwargs)


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    stock, apart = gathers_of_steps(True), gathers_of_steps(False)
    print("norm and head in one unit:", *stock)
    print("a unit each:", *apart)
    assert [step["lm_head"] for step in stock] == [2, 3]
    assert [step["lm_head"] for step in apart] == [1, 1]


if __name__ == "__main__":
    main()
