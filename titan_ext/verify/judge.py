# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of a job held against others: which are wrong, by which factor, and how far is rounding.

Gradients are the witness, tensor by tensor in fp64. Of 13 planted faults 10 leave the loss as it is
to 1e-7, and Adam's update divides most factors out.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

_TIMES, _LEAST = 30.0, 1e-6
"""A gradient may be off by so many times its own rounding (fp32 against fp64), and by at least so
much. Right jobs are off by 8e-6 at most, planted faults by 0.24 and more (benchmarks/LOG.md)."""
_CANARY = 1.001
_LOSS = 1e-5
_STEP = 1e-5
_ULP = 4e-7
_NAMED = 5
"""Wrong tensors of a category that are named."""
MOST_LOST, MOST_TIMES = 0.5, 2.0
"""Bounds of keys that keep fewer bits: a wrong scale shows, a coarse one does not."""
_OF_BF16, _LIMIT = 4.0, 0.9
"""The first of them is so many times stock's own distance from fp32, where that is more, and less
than a gradient of zeros is off by. Small copies of gpt_oss: 0.22 in bf16, 0.53 with float8."""
DRAWS = 3
"""Weights and tokens are drawn again where a near-tie of experts may explain a difference."""
NEAR_TIE = 1e-6
"""Scores of experts that are nearer than this may be chosen otherwise by rounding alone."""


@dataclass(frozen=True)
class Wrong:
    """A tensor that is not what it should be."""

    name: str
    """Of the parameter, or what else it is."""
    error: float
    """Norm of the difference, as a share of the right one's; infinite if the name says it all."""
    factor: float = 1.0
    """Least-squares factor between the two; 1 where the difference is not a factor."""

    def __str__(self) -> str:
        if self.error == float("inf"):
            return self.name
        is_factor = abs(self.factor - 1) > 0.5 * self.error and self.error < 1e3
        said = f"{self.factor:.4f} of the right one, " if is_factor else ""
        return f"{self.name} is {said}off by {self.error:.2g}"


@dataclass
class Verdict:
    """One comparison."""

    wrong: dict[str, list[Wrong]] = field(default_factory=dict)
    """By category ("grads", "loss", ...), the worst first."""
    worst: dict[str, float] = field(default_factory=dict)
    """The largest error by category, of right tensors too."""
    gap: float = float("inf")
    """The smallest distance between scores of a chosen expert and another."""
    step: int = 0
    """The last step that was judged; none is after one that is wrong."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not any(self.wrong.values())

    @property
    def may_be_a_tie(self) -> bool:
        """True if rounding alone may have chosen another expert for a token."""
        return self.gap < NEAR_TIE

    def judge(
        self,
        category: str,
        name: str,
        found: torch.Tensor | None,
        right: torch.Tensor,
        limit: float | Callable[[float], float],
    ) -> None:
        """Hold a tensor against the right one; None is missing. A ``limit`` may be of the error."""
        if found is None or found.shape != right.shape:
            self.note(category, f"{name} (missing)")
            return
        error, factor = distance(found, right)
        self.worst[category] = max(self.worst.get(category, 0.0), error)
        if not error <= (limit(error) if callable(limit) else limit):  # NaN, too
            self.wrong.setdefault(category, []).append(Wrong(name, error, factor))
            self.wrong[category].sort(key=lambda each: -each.error)

    def note(self, category: str, *said: str) -> None:
        """Note what is wrong and has no distance, such as a gradient that should not be there."""
        for each in said:
            self.wrong.setdefault(category, []).append(Wrong(each, float("inf")))

    def note_apart(self, names: Sequence[str]) -> None:
        """Tensors that differ between ranks which should have the same are wrong on one of them."""
        self.note("ranks", *(f"{n} differs between ranks that should have the same" for n in names))

    def take(self, other: "Verdict", where: str) -> None:
        """Take over what another comparison found, and say where."""
        for category, wrong in other.wrong.items():
            said = [replace(each, name=f"{each.name} {where}") for each in wrong]
            self.wrong.setdefault(category, []).extend(said)
        for category, worst in other.worst.items():
            self.worst[category] = max(self.worst.get(category, 0.0), worst)
        self.gap = min(self.gap, other.gap)

    def lines(self) -> list[str]:
        said = []
        for category in dict.fromkeys([*self.worst, *self.wrong]):
            worst = self.worst.get(category, 0.0)
            if wrong := self.wrong.get(category):
                said.append(f"{category:10}WRONG           {wrong[0]}")
                said += [f"{'':26}{each}" for each in wrong[1:_NAMED]]
                if len(wrong) > _NAMED:
                    said.append(f"{'':26}and {len(wrong) - _NAMED} more")
            else:
                said.append(
                    f"{category:10}{'equal' if not worst else 'rounding only':16}"
                    f"{f'at most {worst:.1g}' if worst else ''}".rstrip()
                )
        return said + self.notes


def distance(found: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Norm of the difference as a share of the right norm, and the factor that explains most."""
    if right.is_complex():  # caches of rotary embeddings
        found, right = torch.view_as_real(found), torch.view_as_real(right)
    found, right = found.double(), right.double()
    size = float(right.norm())
    if not size:
        return float(found.norm()), 1.0
    return float((found - right).norm()) / size, float((found * right).sum()) / size**2


def read_step(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The whole tensors of which the ranks of an arm left shards, of all pipeline stages."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob(f"step{step}_rank*.pt")):
        for name, kept in torch.load(file, weights_only=True).items():
            values, start, shape = kept if isinstance(kept, tuple) else (kept, None, ())
            if start is None:
                tensors[name] = values
                continue
            if name not in tensors:  # what no rank left is no number
                tensors[name] = values.new_full(shape, float("nan"))
            ends = map(sum, zip(start, values.shape, strict=True))
            tensors[name][tuple(map(slice, start, ends))] = values
    assert tensors, f"no rank left tensors of step {step} in {folder}"
    return tensors


def of_kind(tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Tensors of one kind ("grad", "param", "load", "bias"), by name."""
    prefix = f"{kind}:"
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def judge_step(
    verdict: Verdict,
    found: Mapping[str, torch.Tensor],
    seen: Mapping[str, Any],
    step: int,
    right: Any,
    narrow: Any,
) -> dict[str, float]:
    """Hold a step of a job against the reference in fp64, and what fp32 makes of that.

    The job left the tensors ``found`` (``read_step``), and said ``loss`` and ``norm`` by step.
    ``right`` and ``narrow`` are a ``reference.Step`` in fp64, and in fp32 with the same choices of
    experts. Returns what ``judge_gradients`` does.
    """
    rounding = judge_gradients(verdict, of_kind(found, "grad"), right.grads, narrow.grads)
    verdict.note("grads", *(f"{x} (without gradient in the model itself)" for x in right.without))
    for name, load in right.loads.items():
        verdict.judge("load", name, of_kind(found, "load").get(name), load, 0.0)
    # The norm may be off as far as all gradients together.
    sizes = {name: float(grad.norm()) for name, grad in right.grads.items()}
    off = math.hypot(*(rounding[name] * size for name, size in sizes.items()))
    limits = {"loss": _LOSS, "norm": max(_LOSS, _TIMES * off / (math.hypot(*sizes.values()) or 1))}
    for category, limit in limits.items():
        value = torch.tensor(seen[category][step - 1], dtype=torch.float64)
        expected = torch.tensor(getattr(right, category), dtype=torch.float64)
        verdict.judge(category, f"of step {step}", value, expected, limit)
    verdict.gap = min(verdict.gap, right.gap)
    return rounding


def judge_gradients(
    verdict: Verdict,
    found: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    narrow: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """Hold gradients, by name, against those in fp64; the limit is what fp32 makes of these.

    Returns how far fp32 alone is off, as a share of each gradient's norm.
    """
    rounding = {name: distance(narrow[name], grad)[0] for name, grad in right.items()}
    for name, grad in right.items():
        limit = max(_TIMES * rounding[name], _LEAST)
        verdict.judge("grads", name, found.get(name), grad, limit)
    verdict.note("grads", *(f"{name} (needless)" for name in found.keys() - right.keys()))
    return rounding


def try_canary(
    judge: Callable[..., object],
    found: Mapping[str, torch.Tensor],
    seed: int,
    rounding: Mapping[str, float] | None = None,
) -> None:
    """Scale one gradient by 1.001, and see that ``judge`` names it.

    ``judge`` takes a verdict and tensors, and found nothing wrong with those that a job left of a
    step. Where fp32 alone is off by so much that 1.001 does not show, as ``rounding`` says by name,
    another gradient is drawn: TorchTitan's small muse_glimmer has such in its first blocks.
    """
    names = [name for name, tensor in found.items() if name.startswith("grad:") and tensor.any()]
    off = {f"grad:{name}": 1.1 * _TIMES * share for name, share in (rounding or {}).items()}
    names = [name for name in names if off.get(name, 0.0) < _CANARY - 1] or names
    name = names[zlib.crc32(str(seed).encode()) % len(names)]
    verdict = Verdict()
    judge(verdict, {**found, name: found[name].double() * _CANARY})
    blamed = [wrong.name for wrong in verdict.wrong.get("grads", ())]
    if blamed != [name.removeprefix("grad:")]:
        said = f"{name} is {_CANARY} of what it was"
        raise AssertionError(f"verify does not see that {said}: {blamed}")


def judge_update(
    verdict: Verdict,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> None:
    """Hold an optimizer's step against the one that the same gradients make in one process."""
    for name, right in expected.items():
        update = (right - before[name]).double()
        size = float(update.norm())
        limit = max(_STEP, _ULP * float(right.double().norm()) / size) if size else 0.0
        found = after.get(name)
        change = None if found is None else (found - before[name])
        verdict.judge("optimizer", name, change, update, limit)


def judge_equal(
    verdict: Verdict, found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]
) -> None:
    """Hold all tensors of one arm against those of another, bit for bit."""
    for name in [*right, *(name for name in found if name not in right)]:
        kind, _, of = name.partition(":")
        category = {"grad": "grads", "param": "weights"}.get(kind, kind)
        if name in right:
            verdict.judge(category, of, found.get(name), right[name], 0.0)
        else:
            verdict.note(category, f"{of} (needless)")


def judge_loaded(
    verdict: Verdict, found: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> None:
    """Hold what a trainer loaded against what another one saved, bit for bit."""
    for key, right in saved.items():
        kind, _, name = key.partition(":")
        if kind in ("param", "bias", "buffer", "state"):
            verdict.judge("resume", name, found.get(key), right, 0.0)


def judge_rounding(
    verdict: Verdict,
    found: Mapping[str, torch.Tensor],
    stock: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
) -> None:
    """Hold gradients in the job's dtypes against fp32's: at most twice as far as stock's."""
    stocks = of_kind(stock, "grad")
    for name, grad in of_kind(right, "grad").items():
        own, _ = distance(stocks[name], grad)
        verdict.judge("rounding", name, of_kind(found, "grad").get(name), grad, 2 * own)


def judge_lossy(
    verdict: Verdict,
    found: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    stock: Mapping[str, torch.Tensor],
    fp32: Callable[[], Mapping[str, torch.Tensor]],
) -> None:
    """Hold gradients with fewer bits against those of the same arm without.

    All together by their distance, each by its norm. A router's gradient is a small difference, and
    of a model that has learned nothing it may point anywhere. Where rounding alone changes much,
    ``stock`` in the job's dtypes and ``fp32`` say how much.
    """
    grads, right = of_kind(found, "grad"), of_kind(exact, "grad")

    def limit(error: float) -> float:
        if error <= MOST_LOST:
            return MOST_LOST
        own, _ = distance(*(_whole(of_kind(arm, "grad"), right) for arm in (stock, fp32())))
        verdict.notes.append(f"{'':10}stock in the job's dtypes is {own:.2g} off from fp32")
        return max(MOST_LOST, min(_OF_BF16 * own, _LIMIT))

    _judge_together(verdict, "lossy", grads, right, limit)


def judge_dtypes(
    verdict: Verdict, found: Mapping[str, torch.Tensor], fp32: Mapping[str, torch.Tensor]
) -> None:
    """Hold gradients in the job's dtypes against those in fp32: all together, each by its norm.

    Code of the model's own that runs in bf16 alone has no other witness: stock runs it, too. Small
    copies are off by 0.02 (llama3) to 0.56 (muse_glimmer), and norms by a factor of 1.27 at most.
    """
    grads, right = of_kind(found, "grad"), of_kind(fp32, "grad")
    _judge_together(verdict, "from fp32", grads, right, _LIMIT)


def _judge_together(
    verdict: Verdict,
    category: str,
    found: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    limit: float | Callable[[float], float],
) -> None:
    """Hold all gradients by their distance, and each by its norm; ``limit`` is of the distance."""
    if lacking := [f"{name} (missing)" for name in right if name not in found]:
        verdict.note(category, *lacking)
        return
    whole, whole_right = _whole(found, right), _whole(right, right)
    verdict.judge(category, "the whole gradient", whole, whole_right, limit)
    for name, grad in right.items():
        size, ratio = float(grad.norm()), float(found[name].norm())
        if size and not 1 / MOST_TIMES <= ratio / size <= MOST_TIMES:
            verdict.wrong.setdefault(category, []).append(Wrong(name, 1.0, ratio / size))


def _whole(grads: Mapping[str, torch.Tensor], names: Iterable[str]) -> torch.Tensor:
    return torch.cat([grads[name].double().flatten() for name in names])
