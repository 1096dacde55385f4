"""Training runs that save, resume and load: legs of a run, and the tensors that they hold.

A leg is one start of the trainer, in processes of its own: it loads, trains and saves as its
checkpoint settings say. What a leg holds after loading is compared with the file tensor by tensor,
as whole tensors; the file is read without any process group.
"""

import contextlib
import functools
import hashlib
import time
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.tools.logging import init_logger

from tests.helpers.cluster import run_ranks
from tests.helpers.on_cpu import quick_initialisation
from tests.helpers.training import Run, make_config, patched, state_hash
from titan_ext.base import no_accelerator
from titan_ext.base.stdlib_corpus import make_corpus, register_stdlib_corpus
from titan_ext.run import checkpoints
from titan_ext.run.checkpoints import CheckpointManager


class SharedStream(BaseDataLoader):
    """The same global batches whatever the number of ranks: random tokens, seeded by sample.

    Titan's own data loader splits the data by data-parallel rank and refuses to go on with another
    number of them. Here the position is the number of global samples, which every rank shares.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 2048

    def __init__(self, config: Config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        self.vocab_size, self.seq_len = config.vocab_size, seq_len
        self.ranks, self.rank, self.batch = dp_world_size, dp_rank, local_batch_size
        self.samples = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self.samples + self.rank * self.batch
            self.samples += self.ranks * self.batch
            tokens_BL = torch.stack([self._sample(first + i) for i in range(self.batch)])
            positions_BL = torch.arange(self.seq_len).expand(self.batch, -1).clone()
            yield {"input": tokens_BL[:, :-1], "positions": positions_BL}, tokens_BL[:, 1:]

    def _sample(self, index: int) -> torch.Tensor:
        seeded = torch.Generator().manual_seed(index)
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=seeded)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]


@dataclass
class Leg:
    """What one rank reports of one leg."""

    losses: dict[int, float] = field(default_factory=dict)
    """By step; of the ranks of a pipeline only the last stage's are meant."""
    grad_norms: dict[int, float] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    """SHA-256 of every batch that the rank was given, in order."""
    loaded: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every whole tensor after loading; see ``tensor_digests``."""
    state_hash: str = ""
    """Of everything that the rank holds at the end of the leg."""
    learning_rates: list[float] = field(default_factory=list)
    """At the end of the leg, of each parameter group."""


def run_leg(run: Run, folder: Path, *, timeout_s: float = 120.0, **options: Any) -> list[Leg]:
    """Start ``run`` in ``folder``, with the options of ``_run_rank``; what each rank reports."""
    make_corpus()
    rank = functools.partial(_run_rank, **options)
    return run_ranks(rank, run.world, run, folder, log_folder=folder / "logs", timeout_s=timeout_s)


def _run_rank(
    run: Run,
    folder: Path,
    *,
    until: int = 0,
    look: bool = False,
    save_at_once: bool = False,
    shared_stream: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    change: Callable[[Any], Any] = lambda config: None,
    **checkpoint: Any,
) -> Leg:
    """Train ``run`` to step ``until``.

    Args:
        run: ``run.steps`` is what the learning rate schedule is made for.
        until: The step after which the leg ends for want of data; 0: ``run.steps``.
        look: Report every whole tensor after loading.
        save_at_once: End after loading, with the save that Titan makes after the last step.
        shared_stream: Train on ``SharedStream``, not on the text.
        around: What the leg runs in, on every rank.
        change: Called with the trainer's config, on every rank.
        checkpoint: Keys of Titan's checkpoint section; checkpoints are on.
    """
    init_logger()
    no_accelerator.enable()
    register_stdlib_corpus()
    config: Any = make_config(run, folder)
    settings: dict[str, Any] = {"last_save_model_only": False, "interval": 1000, **checkpoint}
    config.checkpoint = CheckpointManager.Config(enable=True, **settings)
    config.lr_scheduler.warmup_steps = 2  # so that the rate is another at each step
    if shared_stream:
        config.dataloader = SharedStream.Config()
    change(config)
    leg = Leg()
    with patched(run), around():
        with no_accelerator.layout_independent_init(), quick_initialisation():
            trainer = config.build()
        _observe(trainer, leg, until or run.steps, look, save_at_once)
        trainer.train()
    leg.state_hash = state_hash(trainer)
    leg.learning_rates = [
        group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups
    ]
    trainer.close()
    dist.barrier()
    return leg


def _observe(trainer: Any, leg: Leg, until: int, look: bool, save_at_once: bool) -> None:
    load, step, log = (
        trainer.checkpointer.load,
        trainer.train_step,
        trainer.metrics_processor.log,
    )

    def observed_load(*args, **kwargs) -> bool:
        nonlocal until
        loaded = load(*args, **kwargs)
        if look:
            leg.loaded = tensor_digests(trainer.checkpointer)
        if save_at_once:
            trainer.checkpointer.save(trainer.step, last_step=True)
            until = trainer.step
        return loaded

    def observed_step(data_iterator) -> None:
        if trainer.step > until:
            raise DataloaderExhaustedError  # Titan ends the run here, with no last save
        step(_noted(data_iterator, leg.samples))

    def observed_log(number: int, loss: float, max_loss: float, grad_norm: float, **kwargs) -> None:
        leg.losses[number], leg.grad_norms[number] = loss, grad_norm
        log(number, loss, max_loss, grad_norm, **kwargs)

    trainer.checkpointer.load = observed_load
    trainer.train_step = observed_step
    trainer.metrics_processor.log = observed_log


def _noted(data_iterator: Iterator[Any], samples: list[str]) -> Iterator[Any]:
    for inputs, labels in data_iterator:
        samples.append(_sha256(torch.cat([inputs["input"], labels])))
        yield inputs, labels


def tensor_digests(checkpointer: Any) -> dict[str, str]:
    """Shape, dtype and SHA-256 of every whole tensor of model and optimizer; on every rank.

    Names are those of the checkpoint; routed experts are one item each, "NAME[17]".
    """
    states = {
        **checkpointer.states["model"].state_dict(),
        **{f"optimizer.{k}": v for k, v in checkpointer.states["optimizer"].state_dict().items()},
    }
    return digests_of({name: _whole(value) for name, value in states.items()})


def read_checkpoint(folder: Path) -> dict[str, str]:
    """The same of a checkpoint in torch's format, read without ranks."""
    plain = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder, plain)
    states = _flat("", torch.load(plain, weights_only=False))
    plain.unlink()
    others = ("dataloader.", "lr_scheduler.", "train_state.")
    return digests_of({name: v for name, v in states.items() if not name.startswith(others)})


def corrupt_items(folder: Path) -> dict[str, str]:
    """The first item of each file of a checkpoint whose checksum is wrong, by file name."""
    return checkpoints._corrupt(folder, 0, 1)


@contextlib.contextmanager
def slow_writes() -> Iterator[None]:
    """Writing begins when training has changed the weights."""
    write = FileSystemWriter.write_data

    def slow_write(*args: Any) -> Any:
        time.sleep(2)
        return write(*args)

    with unittest.mock.patch.object(FileSystemWriter, "write_data", slow_write):
        yield


def flip_a_bit(file: Path) -> None:
    """In its middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def differing(loaded: dict[str, str], saved: dict[str, str]) -> list[str]:
    """Names that are not equal, or on one side only."""
    return [n for n in sorted(loaded.keys() | saved.keys()) if loaded.get(n) != saved.get(n)]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def digests_of(states: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in states.items():
        if isinstance(value, torch.Tensor) and ".inner_experts." in name and value.dim() == 3:
            found |= {f"{name}[{e}]": digest(expert) for e, expert in enumerate(value)}
        else:
            found[name] = digest(value)
    return found


def digest(value: Any) -> str:
    """Shape, dtype and SHA-256 of a tensor; of another value, what Python prints."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.dtype} {_sha256(value)}"


def _sha256(tensor: torch.Tensor) -> str:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(plain.tobytes()).hexdigest()


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(f"{name}.", value) if isinstance(value, dict) else {name: value}
    return flat
