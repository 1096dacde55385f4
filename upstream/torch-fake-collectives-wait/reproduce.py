# SPDX-License-Identifier: BSD-3-Clause
"""Functional collectives wait at once under FakeTensorMode, so that an estimate sees no overlap.

An all-gather is started, something is computed, and the all-gather is used. A dispatch mode notes
the order of what runs. Eagerly the result is a tensor that waits when it is used, after the
computation. Under fake tensors the wait comes before it. No rank is needed: the process group is
fake.
"""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_single
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {"all_gather_into_tensor": "start", "wait_tensor": "wait", "mm": "compute", "add": "use"}


class Order(TorchDispatchMode):
    """The operations of ``NAMES`` in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := NAMES.get(func._schema.name.split("::")[-1])) is not None:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def order() -> list[str]:
    x, world = torch.ones(8, 8), dist.group.WORLD
    assert world is not None
    with Order() as noted:
        gathered = all_gather_single(x, 0, world)
        y = x @ x
        if isinstance(gathered, AsyncCollectiveTensor):
            noted.seen.append("wait")
        gathered + y.repeat(4, 1)
    return noted.seen


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    eager = order()
    with FakeTensorMode():
        fake = order()
    print(f"torch {torch.__version__}: eager {eager}, under fake tensors {fake}")
    assert eager == ["start", "compute", "wait", "use"], "not seen"
    assert fake == ["start", "wait", "compute", "use"], "not seen"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
