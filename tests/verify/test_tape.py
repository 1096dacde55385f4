"""Passes that are replayed as a CUDA graph would: what is right stays, and planted faults show."""

import contextlib
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters

from tests.helpers.cluster import run_ranks
from tests.verify.test_verify import _small
from titan_ext.verify import legs
from titan_ext.verify.judge import Verdict
from titan_ext.verify.tape import Replayed, judge_replay

STEPS = 2


class Net(nn.Module):
    """A model with what a graph holds: a buffer that is written in place, and a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("counts", torch.zeros(4))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.counts.add_(x.detach().sum(0))
        return nn.functional.dropout(self.linear(x), 0.5) + self.counts


class Counter(Net):
    def forward(self, x):
        return super().forward(x) * self.passes


class FloatScale(Net):
    scale = 1.0  # the trainer's, from the step before

    def forward(self, x):
        return super().forward(x) * self.scale


class HostScale(Net):
    def forward(self, x):
        return super().forward(x) * torch.tensor(1.0 + self.scale)

    scale = 0.0


class Assigned(Net):
    def forward(self, x):
        self.counts = self.counts * 0.5 + x.detach().mean(0)
        return super().forward(x)


class MadeAnew(Net):
    def after_step(self) -> None:
        self.counts = self.counts * 2


class HookOnce(Net):
    def forward(self, x):
        if self.passes == 1:  # as the second pass is recorded
            x = x * 3
        return super().forward(x)


class OwnGenerator(Net):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return super().forward(x) * torch.rand(4, generator=self.generator)


class BakedRate(Net):
    """An optimizer in backward, with the rate of a schedule as a number."""

    def __init__(self):
        super().__init__()
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(self._update)

    def _update(self, param: torch.Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.01 * (1 - self.scale))

    scale = 0.0


class OtherThread(Net):
    """What another stream does, whose event no graph waits for: here, an all-reduce in place."""

    def forward(self, x):
        y = super().forward(x)
        sums = torch.zeros(4)
        reduce = threading.Thread(target=lambda: sums.copy_(y.detach().sum(0)))
        reduce.start()
        reduce.join()
        return y * sums


def _run(kind: type[Net], folder: Path, replays: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net: Any = kind()
    rate = [0.5]

    def function(inputs: Any, labels: Any, tokens: Any, extra: Any) -> torch.Tensor:
        loss = ((net(inputs) - labels) ** 2).sum() / tokens
        loss.backward()
        return loss

    graph = Replayed(function, [net], replays=replays)
    seen: dict[str, Any] = {"loss": [], "graph": graph.seen}
    draw = torch.Generator().manual_seed(2)
    for step in range(1, STEPS + 1):
        for _ in range(3):
            inputs, labels = (torch.randn(3, 4, generator=draw) for _ in range(2))
            loss = graph(inputs, labels, torch.tensor(3.0), {"positions": None})
        seen["loss"].append(float(loss.detach()))
        found = {f"grad:{name}": param.grad.clone() for name, param in net.named_parameters()}
        found |= {f"buffer:{name}": buffer.clone() for name, buffer in net.named_buffers()}
        torch.save(found, folder / f"step{step}_rank0.pt")
        with torch.no_grad():
            for param in net.parameters():
                param.sub_(param.grad, alpha=rate[0] * 0.01)
                param.grad.zero_()
        net.scale = step / 4
        getattr(net, "after_step", lambda: None)()
    return seen


def _judge(kind: type[Net], folder: Path) -> Verdict:
    folders, seen = [], []
    for replays in (True, False):
        folders.append(folder / str(replays))
        folders[-1].mkdir()
        seen.append(_run(kind, folders[-1], replays))
    return judge_replay(folders, seen, STEPS)


def test_a_pass_is_replayed_on_other_batches(tmp_path: Path):
    """Buffers in place, draws of torch's own generator, gradients that add up over three passes."""
    verdict = _judge(Net, tmp_path)
    assert verdict.lines()[:-1] == ["grads     equal", "buffer    equal", "loss      equal"]
    assert verdict.lines()[-1].endswith(" operations in 4 more passes")


FAULTS: dict[type[Net], tuple[str, str]] = {
    Counter: ("grads", "Counter.forward (verify/test_tape.py:"),
    FloatScale: ("grads", "aten.mul.Tensor[1.0]; in a later pass"),
    HostScale: ("grads", "aten.lift_fresh.default[1.0]; in a later pass"),
    Assigned: ("buffer", ""),
    MadeAnew: ("buffer", ""),
    HookOnce: ("grads", "HookOnce.forward (verify/test_tape.py:"),
    OwnGenerator: ("grads", ""),
    BakedRate: ("grads", "BakedRate._update (verify/test_tape.py:"),
    OtherThread: ("grads", ""),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_no_graph_does_is_wrong(kind: type[Net], tmp_path: Path):
    """With the tensor and the operation that wrote it, and the line at which Python is to blame."""
    category, says = FAULTS[kind]
    verdict = _judge(kind, tmp_path)
    assert verdict.wrong.get(category), verdict.lines()
    said = "\n".join(verdict.lines())
    assert "first     linear." in said or "first     counts" in said, said
    assert "wrote last" in said
    if says:
        assert says in said.partition("Python ")[2], said
    else:
        assert "Python " not in said, said


def test_passes_are_compiled_once():
    """Whichever of them are listened to: the compiler guards what the modes around it ask."""
    torch._dynamo.reset()
    counters.clear()
    net = nn.Linear(4, 4)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    graph = Replayed(lambda x, *_: compiled(x).sum(), [net], replays=False)
    for _ in range(5):
        graph(torch.randn(3, 4), torch.zeros(3), torch.tensor(3.0), {"positions": None})
    assert graph.seen["ops"] == 0
    assert counters["stats"]["unique_graphs"] == 1


READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "branch": lambda x: 1 if x.sum() > 0 else 2,
    "nonzero": lambda x: len(x.nonzero()),
    "mask": lambda x: len(x[x > 0]),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "numpy": lambda x: x.detach().numpy(),
    "written": lambda x: x.clone().index_put_((x.sum(1) > 0,), x[0]),
    "repeated": lambda x: x.repeat_interleave(torch.tensor([2, 1, 0]), dim=0),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_by_the_host_is_refused(read: str, tmp_path: Path):
    class Reads(Net):
        def forward(self, x):
            READS[read](self.linear(x.detach()))
            return super().forward(x)

    (said,) = _judge(Reads, tmp_path).wrong["host"]
    assert "(verify/test_tape.py:" in str(said)
    assert "the host reads a value (" in str(said)


def test_sizes_and_masks_that_the_host_does_not_ask_for(tmp_path: Path):
    class Sized(Net):
        def forward(self, x):
            repeats = torch.tensor([2, 1, 0])  # as in TorchTitan's gpt_oss
            x = x + 0 * x.repeat_interleave(repeats, dim=0, output_size=len(x))
            x = x.index_put((x.sum(1) > 2,), torch.tensor(0.5))
            return super().forward(x[torch.tensor([2, 0, 1])])

    assert _judge(Sized, tmp_path).is_right


_PLAIN = 'extends = "moe_debug.toml"\nworld_size = 2\n'


def _verify(folder: Path, *flags: str, job: str = _PLAIN) -> Verdict:
    """The leg alone, of a small copy of the debug model on two ranks."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (path := folder / "job.toml").write_text(job)
    small = _small(str(path), flags, 2)
    with contextlib.redirect_stdout(io.StringIO()), legs.Legs(small, folder) as comparison:
        return comparison.graphs()


def _fp8(folder: Path) -> Verdict:
    flags = "--parallelism.expert_parallel_degree", "1", "activation-checkpoint:fp8"
    return _verify(folder, *flags)


_HYBRID = """
extends = "moe_debug.toml"
world_size = 2
training.disable_cuda_graphs = false
activation_checkpoint.policy = "full"
[model]
moe_comm_backend = "hybridep"
non_blocking_capacity_factor = 0.4
"""


def _hybrid(folder: Path) -> Verdict:
    return _verify(folder, "--parallelism.expert_parallel_degree", "2", job=_HYBRID)


def test_a_job_is_replayed(tmp_path: Path):
    """FSDP's units, its collectives and float8 activations, on two ranks."""
    (verdict,) = run_ranks(_fp8, 1, tmp_path, log_folder=tmp_path, timeout_s=300)
    assert verdict.is_right, verdict.lines()
    assert {"grads", "weights", "buffer", "bias", "load", "loss"} <= verdict.worst.keys()


def test_a_job_with_expert_parallelism_is_replayed(tmp_path: Path):
    """Titan's HybridEP dispatcher on CPU kernels that keep counts on the device, and drop."""
    (verdict,) = run_ranks(_hybrid, 1, tmp_path, log_folder=tmp_path, timeout_s=300)
    assert verdict.is_right, verdict.lines()
    (said,) = (line for line in verdict.lines() if line.startswith("dropped"))
    share = float(said.split()[1].removesuffix("%"))
    assert 0 < share < 60
