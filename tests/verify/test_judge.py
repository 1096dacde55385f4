"""The judge of ``titan_ext verify``, by tensors of a few values: no ranks, no models."""

import functools
import unittest.mock
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from torchao.quantization import to_nf4

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.components.float8_linears import GatheredWeight
from titan_ext.config_registry.resolve import resolve
from titan_ext.verify import legs
from titan_ext.verify.arm import POLICY, Arm, sum_in_order, whole
from titan_ext.verify.judge import (
    NEAR_TIE,
    Verdict,
    Wrong,
    distance,
    judge_dtypes,
    judge_equal,
    judge_loaded,
    judge_lossy,
    judge_rounding,
    judge_step,
    judge_update,
    read_step,
    try_canary,
)
from titan_ext.verify.legs import Legs, Trained, apart
from titan_ext.verify.reference import OneProcess, Step

RIGHT = torch.linspace(-1, 1, 100, dtype=torch.float64)
SEEN = {"loss": [2.0], "norm": [3.0]}


def _step(grad: torch.Tensor, without: tuple[str, ...] = ()) -> Step:
    loads = {"moe": torch.tensor([3.0, 5.0])}
    return Step({"w": grad}, loads, 2.0, 3.0, 1e-3, [], list(without))


def _found(grad: torch.Tensor, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"grad:w": grad, "load:moe": torch.tensor([3.0, 5.0]), **others}


def _judged(found: dict[str, torch.Tensor], seen: Any = SEEN, **changes: Any) -> dict[str, Any]:
    verdict = Verdict()
    step = _step(RIGHT, **changes)
    judge_step(verdict, found, seen, 1, step, _step(RIGHT * (1 + 1e-7)))
    return verdict.wrong


def test_rounding_is_right_up_to_thirty_times_its_own():
    assert _judged(_found(RIGHT * (1 + 2.9e-6))) == {}
    (wrong,) = _judged(_found(RIGHT * (1 + 3.1e-6)))["grads"]
    assert (wrong.name, wrong.factor) == ("w", pytest.approx(1 + 3.1e-6))


def test_where_fp32_is_far_off_the_norm_may_be():
    """As far as gradients may; and a canary is one that shows."""
    right = replace(_step(RIGHT), grads={"w": RIGHT, "v": RIGHT})
    narrow = replace(right, grads={"w": RIGHT * (1 + 1e-4), "v": RIGHT})
    judge = functools.partial(judge_step, step=1, right=right, narrow=narrow)
    found, off = _found(RIGHT, **{"grad:v": RIGHT}), Verdict()
    most = 30 * 1e-4 / 2**0.5  # of both
    rounding = judge(off, found, seen=SEEN | {"norm": [3.0 * (1 + 0.99 * most)]})
    assert off.is_right
    judge(off, found, seen=SEEN | {"norm": [3.0 * (1 + 1.01 * most)]})
    assert list(off.wrong) == ["norm"]
    judge = functools.partial(judge, seen=SEEN)
    for seed in range(8):
        try_canary(judge, found, seed, rounding)
    with pytest.raises(AssertionError, match=r"does not see that grad:w is 1\.001"):
        [try_canary(judge, found, seed) for seed in range(8)]


@pytest.mark.parametrize(
    ("found", "category", "name"),
    [
        ({"load:moe": torch.tensor([3.0, 5.0])}, "grads", "w (missing)"),
        (_found(RIGHT[:-1]), "grads", "w (missing)"),
        (_found(RIGHT, **{"grad:v": torch.ones(1)}), "grads", "v (needless)"),
        (_found(RIGHT * torch.nan), "grads", "w"),
        (_found(RIGHT, **{"load:moe": torch.tensor([6.0, 10.0])}), "load", "moe"),
    ],
)
def test_what_is_missing_needless_or_no_number_is_wrong(found: Any, category: str, name: str):
    (wrong,) = _judged(found)[category]
    assert wrong.name == name


def test_loss_and_norm():
    wrong = _judged(_found(RIGHT), {"loss": [2.0 * (1 + 2e-5)], "norm": [3.0 * 1.41]})
    assert str(wrong["norm"][0]) == "of step 1 is 1.4100 of the right one, off by 0.41"
    assert wrong.keys() == {"loss", "norm"}


def test_a_parameter_that_nothing_trains_is_named():
    (wrong,) = _judged(_found(RIGHT), without=("gate",))["grads"]
    assert wrong.name == "gate (without gradient in the model itself)"


def test_a_factor_is_told_only_where_it_explains_the_difference():
    assert distance(RIGHT * 0.5, RIGHT) == pytest.approx((0.5, 0.5))
    assert str(Wrong("w", 0.5, 0.5)) == "w is 0.5000 of the right one, off by 0.5"
    assert str(Wrong("w", 1.4, 1.01)) == "w is off by 1.4"
    assert distance(RIGHT, RIGHT * 0) == (float(RIGHT.norm()), 1.0)


def test_an_update_is_held_against_that_of_the_same_gradients():
    before, after = {"w": RIGHT}, {"w": RIGHT - 1e-2}
    for found, is_right in ((after["w"], True), (RIGHT - 0.9e-2, False)):
        verdict = Verdict()
        judge_update(verdict, before, {"w": found}, after)
        assert verdict.is_right == is_right


def test_the_other_two_comparisons():
    exact, stock = _found(RIGHT), _found(RIGHT + 1e-2)
    for off, is_right in ((1.9e-2, True), (2.1e-2, False)):
        verdict = Verdict()
        judge_rounding(verdict, _found(RIGHT + off), stock, exact)
        assert verdict.is_right == is_right
    small = {**exact, "grad:small": RIGHT[:3] * 1e-3}
    for factor, of_small, wrong in (
        (1.4, 1.9, []),
        (1.6, 1, ["the whole gradient"]),
        (1, 2.1, ["small"]),
    ):
        verdict = Verdict()
        lost = _found(RIGHT * factor, **{"grad:small": RIGHT[:3] * 1e-3 * of_small})
        judge_lossy(verdict, lost, small, small, lambda: small)
        assert [each.name for each in verdict.wrong.get("lossy", ())] == wrong


@pytest.mark.parametrize(
    ("off", "stock_off", "is_right"),
    [(0.4, 0.1, True), (0.6, 0.1, False), (0.6, 0.2, True), (0.95, 1, False)],
)
def test_more_may_be_lost_where_rounding_alone_changes_much(
    off: float, stock_off: float, is_right: bool
):
    """The gradients in fp32 take a forward of their own, which few need."""
    other = RIGHT.square() * RIGHT.norm() / RIGHT.square().norm()  # at a right angle
    stock, fp32 = _found(RIGHT + stock_off * other), unittest.mock.Mock(return_value=_found(RIGHT))
    verdict = Verdict()
    judge_lossy(verdict, _found(RIGHT + off * other), _found(RIGHT), stock, fp32)
    assert verdict.is_right == is_right
    assert fp32.called == (off > 0.5)


def test_dtypes_change_no_norm_by_more_than_a_factor_of_two():
    small, verdict = torch.ones(3), Verdict()
    fp32 = _found(RIGHT, **{"grad:v": small})
    judge_dtypes(verdict, _found(RIGHT.flip(0).neg(), **{"grad:v": small * 1.9}), fp32)
    assert verdict.is_right
    judge_dtypes(verdict, _found(RIGHT, **{"grad:v": small * 2.1}), fp32)
    (wrong,) = verdict.wrong["from fp32"]
    assert (wrong.name, wrong.factor) == ("v", pytest.approx(2.1))
    lost = Verdict()  # on all ranks, in stock too
    judge_dtypes(lost, _found(RIGHT), fp32)
    assert [each.name for each in lost.wrong["from fp32"]] == ["v (missing)"]


def test_what_was_loaded_is_what_was_saved():
    saved = {"grad:w": RIGHT, "param:w": RIGHT, "bias:b": RIGHT, "state:step of w": torch.ones(())}
    loaded = {name: tensor.clone() for name, tensor in saved.items() if name != "grad:w"}
    right = Verdict()
    judge_loaded(right, loaded, saved)
    assert right.is_right
    loaded["param:w"][3] = loaded["param:w"][3].nextafter(torch.tensor(2.0))
    del loaded["state:step of w"]
    each = Verdict()
    judge_loaded(each, loaded, saved)
    right.take(each, "after it")
    assert {w.name for w in right.wrong["resume"]} == {"w after it", "step of w (missing) after it"}
    assert 0 < right.worst["resume"] < 1e-15


def test_what_only_one_arm_has_is_wrong():
    """A gradient of what stock leaves frozen, or none of what it trains."""
    one, other = _found(RIGHT), _found(RIGHT, **{"grad:v": RIGHT})
    for found, right, name in ((one, other, "v (missing)"), (other, one, "v (needless)")):
        verdict = Verdict()
        judge_equal(verdict, found, right)
        assert [wrong.name for wrong in verdict.wrong["grads"]] == [name]
    verdict = Verdict()
    judge_lossy(verdict, one, other, other, dict)
    assert [wrong.name for wrong in verdict.wrong["lossy"]] == ["v (missing)"]


def test_an_arm_is_trained_once(tmp_path: Path):
    class Ranks:
        def call(self, call: Any) -> list[dict[str, Any]]:
            trained.append(call)
            rank = {"digests": {}, "engaged": {}, "rounded": []}
            return [rank | {"has_loss": True, "loss": [1.0]}, rank | {"has_loss": False}]

    trained: list[Any] = []
    legs = Legs(None, tmp_path)  # type: ignore[arg-type]
    legs._ranks = Ranks()  # type: ignore[assignment]
    for changes in ((), (("parallelism.fsdp_replicate", []),), ()):
        assert legs._run(Arm(changes=changes)).seen["loss"] == [1.0]
    assert [len(arm.changes) for arm, *_ in trained] == [0, 1]


def test_the_canary_sings():
    def skipped(verdict: Verdict, found: Any) -> None:
        pass

    def loose(verdict: Verdict, found: Any) -> None:
        verdict.judge("grads", "w", found["grad:w"], RIGHT, 1e-2)

    for right in (RIGHT, torch.full((100,), 1.5, dtype=torch.bfloat16)):  # rounds 1.5015 to 1.5
        of = _found(right)
        try_canary(lambda verdict, changed, of=of: judge_equal(verdict, changed, of), of, 1)
    found = _found(RIGHT)
    for judge in (skipped, loose):
        with pytest.raises(AssertionError, match=r"does not see that grad:w is 1\.001"):
            try_canary(judge, found, 1)


def test_the_canary_is_tried_after_each_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What finds nothing wrong with anything is no judge."""
    torch.save(_found(RIGHT), tmp_path / "step1_rank0.pt")
    for name in ("judge_step", "judge_equal"):
        monkeypatch.setattr(legs, name, lambda *args, **kwargs: None)
    axes: Any = SimpleNamespace(arm=Arm(), balances=False, optimizer=None)
    steps = _step(RIGHT), _step(RIGHT)
    with pytest.raises(AssertionError, match="verify does not see"):
        legs._Axes.judge(axes, Verdict(), _found(RIGHT), SEEN, 1, steps)
    with pytest.raises(AssertionError, match="verify does not see"):
        legs._judge(axes, 0, ("keys", [("equal", 1, tmp_path, tmp_path)]))


def test_a_norm_sends_its_input_one_gradient():
    """In fp32 on a CPU it sends several, which FSDP's units add up in another order."""

    def sent(norm: torch.nn.Module) -> int:
        x = torch.ones(2, 4, requires_grad=True) * 1
        nodes, found = [norm(x).grad_fn], set()
        while nodes:
            node = nodes.pop()
            following = [] if node is None or node is x.grad_fn else node.next_functions
            found |= {(node, at) for at, (other, _) in enumerate(following) if other is x.grad_fn}
            nodes += [other for other, _ in following]
        return len(found)

    norm = torch.nn.RMSNorm(4)
    assert sent(norm) > 1
    sum_in_order(norm)
    assert sent(norm) == 1

    model: Any = torch.nn.Module()
    attention = _ReadsTwice()
    model.layers = torch.nn.ModuleDict({"0": checkpoint_wrapper(_Holds(attention))})
    assert sent(attention) > 1
    sum_in_order(model)
    assert sent(attention) == 1


class _Holds(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention


class _ReadsTwice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.cos()


def test_a_model_that_checkpoints_itself_recomputes_as_it_ran():
    x = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
    with OneProcess([]):
        checkpoint(lambda x: x.bfloat16().sin(), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_what_is_kept_of_a_weight_is_plain():
    """``torch.load`` reads no class of a converter's, and NF4 has no bytes of its own."""
    weight = GatheredWeight(RIGHT[None], None, torch.float8_e4m3fn)  # type: ignore[arg-type]
    assert type(whole(torch.nn.Parameter(weight))) is torch.Tensor
    nf4: Any = to_nf4(torch.randn(64, 256).bfloat16())
    sharded = DTensor.from_local(nf4, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert torch.equal(whole(sharded), nf4.get_original_weight())


def test_a_shard_that_no_rank_left_is_not_right(tmp_path: Path):
    shards = [(RIGHT[:60], (0,), (100,)), (RIGHT[60:], (60,), (100,))]
    for rank, shard in enumerate(shards):
        torch.save({"grad:w": shard}, tmp_path / f"step1_rank{rank}.pt")
    assert torch.equal(read_step(tmp_path, 1)["grad:w"], RIGHT)
    (tmp_path / "step1_rank1.pt").unlink()
    verdict = Verdict()
    judge_equal(verdict, read_step(tmp_path, 1), _found(RIGHT))
    assert not verdict.is_right


def test_a_step_that_no_rank_left_is_not_right(tmp_path: Path):
    torch.save(_found(RIGHT), tmp_path / "step1_rank0.pt")
    job: Any = None
    with pytest.raises(AssertionError, match="no rank left tensors of step 2"):
        legs._judge(job, 0, ("keys", [("equal", 2, tmp_path, tmp_path)]))


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ((), []),
        (("--parallelism.exchange_rows", "rank"), ["rounding"]),
        (("--parallelism.exchange_dtype", "float8"), ["lossy"]),
        (("--compile.enable",), []),  # fp32 has judged it
        (("--compile.enable", "activation-checkpoint:fp8"), ["rounding", "lossy"]),
    ],
)
def test_keys_are_compared_by_what_they_do(
    flags: tuple[str, ...], kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And what differs in all arms is WRONG in each of them."""

    def trained(factor: float) -> Trained:
        (folder := tmp_path / str(factor)).mkdir(exist_ok=True)
        torch.save(_found(RIGHT * factor), folder / "step1_rank0.pt")
        return Trained(folder, {"apart": ["b"], "dtypes": {}, "engaged": {}, "keeps": True})

    class Told(legs.Legs):
        def _run(self, arm: Any, saved: Any = None, ranks: Any = None) -> Any:
            return trained(1.2 if arm.stock else 2 if arm.exact else 9)

    monkeypatch.setattr(legs, "_in_fp32", lambda job: _found(RIGHT))
    calls: list[Any] = []
    job: Any = SimpleNamespace(config=resolve("moe_debug.toml", flags).config)
    told = Told(job, tmp_path)
    judge = lambda call: [calls.extend(call[1]) or Verdict()]  # noqa: E731
    told._judge = SimpleNamespace(call=judge)  # type: ignore[assignment]
    assert told.keys().wrong.keys() == {"ranks"}
    assert [kind for kind, *_ in calls] == ["equal", "dtypes", *kinds]
    for call in calls:
        assert not legs._judge(job, 0, ("keys", [call])).is_right


@pytest.mark.parametrize(
    ("key", "engaged", "keeps", "is_refused"),
    [
        ("parallelism.exchange_dtype", 0, True, True),
        ("parallelism.exchange_dtype", 1, False, False),
        (POLICY, 0, False, True),
        (POLICY, 0, True, False),  # all exactly
    ],
)
def test_lossy_keys_do_something(key: str, engaged: int, keeps: bool, is_refused: bool):
    class Told(Legs):
        def _run(self, arm: Any, saved: Any = None, ranks: Any = None) -> Any:
            seen = {"apart": [], "dtypes": {}, "engaged": {key: engaged}, "keeps": keeps}
            return Trained(Path("stock" if arm.stock else "ours"), seen)

    def judge(call: Any) -> list[Verdict]:
        calls.append([each for each in call[1] if each[0] == "lossy"])
        return [Verdict()]

    calls: list[Any] = []
    config: Any = resolve("moe_debug.toml").config
    if key == POLICY:
        config.activation_checkpoint = FP8AC.Config()
    else:
        config.parallelism.exchange_dtype = "float8"
    job: Any = SimpleNamespace(config=config)
    told = Told(job, Path())
    told._judge = SimpleNamespace(call=judge)  # type: ignore[assignment]
    if is_refused:
        with pytest.raises(ValueError, match=f"{key} did nothing in the small copy"):
            told.keys()
        return
    assert told.keys().is_right
    ours, stock = Path("ours"), Path("stock")
    assert calls == [[("lossy", 1, ours, ours, stock)]]


@pytest.mark.parametrize(
    ("gaps", "draws", "is_right"),
    [
        ([NEAR_TIE / 2, 1.0], 2, True),
        ([1.0], 1, False),
        ([NEAR_TIE / 2] * 3, 3, False),
    ],
)
def test_near_ties_are_drawn_again(gaps: list[float], draws: int, is_right: bool):
    verdicts = [Verdict({"grads": [Wrong("w", 0.1)]}, gap=gap) for gap in gaps]
    if is_right:
        verdicts[-1].wrong.clear()

    class Told(Legs):
        def _run(self, arm: Any, saved: Any = None, ranks: Any = None) -> Any:
            seeds.append(arm.seed)
            return Trained(Path(), {"apart": [], "rounded": ["a place"]})

    seeds: list[int] = []
    checkpoint = SimpleNamespace(enable=False)
    job: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=checkpoint))
    legs = Told(job, Path())
    legs._judge = type("Judge", (), {"call": lambda self, call: [verdicts[len(seeds) - 1]]})()
    assert legs.axes().is_right == is_right
    assert seeds == list(range(draws))


def test_a_choice_among_groups_of_experts_has_no_tie_with_those_that_are_masked():
    """Titan's router gives experts of other groups -inf; EP over all of them leaves none else."""
    scores = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf]])
    with OneProcess([]) as process:
        scores.topk(2)
        assert process.gap == torch.inf
        scores.topk(1)
    assert process.gap == 1.0


def test_ranks_that_should_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pipeline stages have other tensors; a replica of HSDP has the same as the other."""
    a, b, c = ("a", ()), ("b", (0, 4)), ("c", ())
    stages = [{a: 1, b: 2, ("b", (2, 4)): 5}, {a: 1, b: 3}, {c: 4}, {c: 4}]
    assert apart(stages) == ["b"]
    verdict = Verdict()
    verdict.note_apart(apart(stages))
    assert verdict.lines() == [
        "ranks     WRONG           b differs between ranks that should have the same"
    ]
    whole = Verdict()
    whole.note_apart(apart(stages[2:]))
    assert whole.is_right
    torch.save(_found(RIGHT), tmp_path / "step1_rank0.pt")
    axes: Any = unittest.mock.Mock()
    monkeypatch.setattr(legs, "_Axes", lambda *_: axes)
    seen = {"apart": ["b"], "balances": False}
    found = legs._judge_axes(axes, Arm(steps=1), tmp_path, seen)
    assert found.wrong.keys() == {"ranks"}
