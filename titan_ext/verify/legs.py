# SPDX-License-Identifier: BSD-3-Clause
"""The two comparisons that prove a job's numbers, and the search for the key that is to blame.

*Axes*: the small job in fp32 against one process. *Keys*: the job's own dtypes against Titan's
parallelize function on the same ranks, bit for bit.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from titan_ext.activation_checkpoint import FP8AC
from titan_ext.activation_checkpoint.compile import compiles_model
from titan_ext.base.facts import LOSSY, ROUNDING, KeyFacts
from titan_ext.components.optim import MUON
from titan_ext.parallelize.keys import COMPILE, FACTS
from titan_ext.parallelize.limits import value_of
from titan_ext.verify.arm import POLICY, Arm, fill_model, run_arm
from titan_ext.verify.judge import (
    DRAWS,
    Verdict,
    judge_dtypes,
    judge_equal,
    judge_loaded,
    judge_lossy,
    judge_rounding,
    judge_step,
    judge_update,
    of_kind,
    read_step,
    try_canary,
)
from titan_ext.verify.ranks import Processes, RunError
from titan_ext.verify.reference import Reference, Step
from titan_ext.verify.small import STEPS, STEPS_OF_KEYS, Layout, SmallJob, in_other_layout
from titan_ext.verify.tape import judge_replay


class Trained(NamedTuple):
    """The folder with an arm's tensors, and what a rank with the losses saw."""

    folder: Path
    seen: dict[str, Any]


class Blame(NamedTuple):
    """Who is to blame for a job that is WRONG."""

    stock: bool = False
    """True if stock TorchTitan is wrong on this layout, too."""
    keys: Sequence[str] = ()
    """The fewest of the job's keys with which it is wrong."""
    off: Mapping[str, Any] = MappingProxyType({})
    """The others, and values that leave their features out."""
    cures: Mapping[str, Any] = MappingProxyType({})
    """Keys without any one of which the job is right, and values that leave it out."""


@dataclass
class Legs:
    """Ranks and a judge for one small job. A ``with`` starts and ends their processes."""

    job: SmallJob
    folder: Path
    """For logs and tensors."""
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _trained: dict[tuple[str, Any, Any], Trained] = field(default_factory=dict)
    _resumes: bool = True

    def __enter__(self) -> "Legs":
        self._judge = self._start(1, functools.partial(_judge, self.job), "judge")
        if self.job.config.compile.enable:
            _compile_once()
        self._ranks = self._start_ranks(self.job, "ranks")
        return self

    def _start_ranks(self, job: SmallJob, name: str) -> Processes:
        return self._start(job.layout.world, functools.partial(_train, job), name)

    def _start(self, count: int, serve: Callable[[int, Any], Any], name: str) -> Processes:
        return self._stack.enter_context(Processes(count, serve, self.folder / name))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def axes(self, **choices: Any) -> Verdict:
        """Hold an arm in fp32 against one process; ``choices`` are fields of ``Arm``.

        What is right is saved, and resumed in the same layout and in another one.
        """
        verdict, is_right = Verdict(), True
        for seed in range(DRAWS):
            arm = Arm(fp32=True, exact=True, seed=seed, **choices)
            trained = self._run(arm)
            (verdict,) = self._judge.call(("axes", arm, *trained))
            places = trained.seen["rounded"]
            verdict.notes += [f"{'rounded':10}to bfloat16 by {place}" for place in places]
            is_right = verdict.is_right
            if is_right and self._resumes and arm.saves(self.job):
                verdict = self._resume(verdict, arm, trained)
            if verdict.is_right or not verdict.may_be_a_tie:
                break
        self._resumes = self._resumes and is_right  # what is to blame shows without
        if seed:
            verdict.notes.append(f"{'':10}drawn {seed + 1} times: experts of nearly equal scores")
        return verdict

    def _resume(self, verdict: Verdict, arm: Arm, saved: Trained) -> Verdict:
        """Go on from the checkpoint of an arm, and add what that shows to its verdict."""
        ranks: list[tuple[Layout, Processes | None]] = [(self.job.layout, None), *self._others]
        resumed = []
        # Eager: no state is in compiled code, and each layout would compile all of it again.
        eager = replace(arm, changes=(*arm.changes, (COMPILE, False)))
        for layout, processes in ranks:
            where = f"after the resume on {layout}"
            try:
                resumed.append((where, self._run(eager, saved.folder, processes)))
            except RunError as error:
                raise RunError(f"{where}, {error}") from None
        (verdict,) = self._judge.call(("resume", verdict, arm, saved, resumed))
        said = " and on ".join(str(layout) for layout, _ in ranks)
        verdict.notes.append(f"{'':10}resumed on {said}")
        if not self._others:
            verdict.notes.append(f"{'':10}no other layout of so many ranks has the job's keys")
        return verdict

    @functools.cached_property
    def _others(self) -> list[tuple[Layout, Processes]]:
        """Ranks of another layout for this job, if its keys allow one."""
        if (job := in_other_layout(self.job)) is None:
            return []
        return [(job.layout, self._start_ranks(job, "others"))]

    def keys(self, **choices: Any) -> Verdict:
        """Hold the job's own dtypes against Titan's own parallelize on the same ranks.

        Keys that change no sum are compared bit for bit; those that do, by their distance from
        fp32, which stock has, too; those that keep or send fewer bits, with the same job without.
        """
        config = self.job.config
        choices.setdefault("steps", STEPS_OF_KEYS)
        off = {key for key, _ in choices.get("changes", ())}
        rounding = [key for key in rounding_keys(config) if key not in off]
        lossy = [key for key in lossy_keys(config) if not {key, key.partition(".")[0]} & off]
        neutral = tuple((key, (*FACTS[key].same, FACTS[key].off)[0]) for key in rounding)
        # A loss that is compiled alone is compiled in both; the first comparison judges it.
        plain = ((COMPILE, False),) if compiles_model(config.compile) or COMPILE in off else ()
        own = Arm(fp32=False, **choices)
        with_table = not (rounding or lossy or own.changes)
        exact = self._run(replace(own, changes=(*own.changes, *neutral), table=with_table))
        stock = self._run(Arm(stock=True, fp32=False, steps=own.steps, changes=plain))
        ours = [exact]
        calls: list[Any] = [("equal", own.steps, exact.folder, stock.folder)]
        calls.append(("dtypes", 1, exact.folder))
        # The first comparison has judged what is compiled, nearer than this one would: it runs
        # in both only where something else rounds or stores float8 in it.
        if rounding and (lossy or rounding != [COMPILE]):
            # Of the first step: then the weights are not the same.
            exact = self._run(replace(own, table=False, steps=1))
            ours.append(exact)
            calls.append(("rounding", 1, exact.folder, stock.folder))
        has_table = not with_table and value_of(config, "activation_checkpoint.op_policies")
        if lossy or has_table:
            both = has_table and POLICY not in lossy  # else its first step is judged
            whole = self._run(replace(own, exact=False, steps=own.steps if both else 1))
            ours.append(whole)
            for key in lossy:
                keeps = key == POLICY and whole.seen["keeps"]  # all exactly, as for gpt_oss
                if not (whole.seen["engaged"].get(key, 1) or keeps):
                    raise ValueError(f"{key} did nothing in the small copy.")
            if lossy:
                calls.append(("lossy", 1, whole.folder, exact.folder, stock.folder))
            if both:
                without = self._run(replace(own, exact=False, table=False))
                calls.append(("equal", own.steps, whole.folder, without.folder))
        (verdict,) = self._judge.call(("keys", calls))
        verdict.note_apart([name for arm in ours for name in arm.seen["apart"]])
        dtypes = ", ".join(f"{name} {dtype}" for name, dtype in ours[-1].seen["dtypes"].items())
        verdict.notes.append(f"{'dtypes':10}{dtypes}")
        counts = {k.rpartition(".")[2]: n for k, n in ours[-1].seen["engaged"].items() if n}
        if counts:
            said = ", ".join(f"{key} in {count} places" for key, count in counts.items())
            verdict.notes.append(f"{'engaged':10}float8: {said}")
        return verdict

    def graphs(self, steps: int = STEPS, **choices: Any) -> Verdict:
        """Hold passes that are replayed as CUDA graphs would against the same in Python."""
        arm = Arm(fp32=False, exact=False, steps=steps, graphs="python", **choices)
        right, found = self._run(arm), self._run(replace(arm, graphs="replayed"))
        (verdict,) = self._judge.call(("graphs", *zip(found, right, strict=True), steps))
        return verdict

    def other_values(self) -> Iterator[tuple[str, Any]]:
        """Keys that may be to blame, each with a value that leaves their feature out."""
        for key, facts in FACTS.items():
            if facts.is_on(value_of(self.job.config, key)):
                yield key, facts.off

    def blame(self, leg: str, verdict: Verdict) -> Blame:
        """Find the fewest keys with which ``leg``, whose ``verdict`` is WRONG, still is.

        Keys are left out one by one, of the steps that show it; then each that is left by itself.
        """
        # Eager: TorchTitan 0.3 halves the experts' loads of compiled blocks with checkpoints.
        if not self.axes(stock=True, steps=verdict.step, changes=((COMPILE, False),)).is_right:
            return Blame(stock=True)
        values = dict(self.other_values())

        def is_wrong(on: Sequence[str]) -> bool:
            changes = tuple((key, value) for key, value in values.items() if key not in on)
            return not getattr(self, leg)(changes=changes, steps=verdict.step).is_right

        keys = [] if is_wrong(()) else list(values)
        for key in list(keys):
            if len(keys) > 1 and is_wrong(rest := [k for k in keys if k != key]):
                keys = rest
        off = {key: value for key, value in values.items() if key not in keys}
        cures = {key: values[key] for key in keys if not is_wrong([k for k in values if k != key])}
        return Blame(keys=keys, off=off, cures=cures)

    def _run(self, arm: Arm, saved: Path | None = None, ranks: Processes | None = None) -> Trained:
        """Train an arm, unless that has been done, or resume it from its files in ``saved``."""
        called = repr(arm), saved, ranks
        if (done := self._trained.get(called)) is not None:
            return done
        folder = Path(tempfile.mkdtemp(prefix="arm_", dir=self.folder))
        seen = (ranks or self._ranks).call((arm, folder, saved))
        engaged = {key: sum(each["engaged"][key] for each in seen) for key in seen[0]["engaged"]}
        # A V-shaped schedule has the last stage on the first ranks of a pipeline.
        of_last = next(each for each in reversed(seen) if each["has_loss"])
        of_last["rounded"] = sorted({place for each in seen for place in each["rounded"]})
        of_last |= {"apart": apart([each["digests"] for each in seen])}
        of_last["engaged"] = engaged
        self._trained[called] = done = Trained(folder, of_last)
        return done


def apart(digests: Sequence[Mapping[Any, int]]) -> list[str]:
    """Names of tensors that are not the same on all ranks of those that have them.

    A key is a name, and where a shard begins.
    """
    found: dict[Any, set[int]] = {}
    for of_rank in digests:
        for shard, digest in of_rank.items():
            found.setdefault(shard, set()).add(digest)
    return list(dict.fromkeys(name for (name, _), of in found.items() if len(of) > 1))


def _compile_once() -> None:
    """Set up what compiles, half a CPU second that forks then save; without threads of backward."""
    with torch.no_grad():
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(1))
    torch._dynamo.reset()


def _train(job: SmallJob, rank: int, call: Any) -> dict[str, Any]:
    arm, folder, saved = call
    return run_arm(job, arm, rank, folder, saved)


def _judge(job: SmallJob, rank: int, call: Any) -> Verdict:
    kind, *arguments = call
    return _JUDGES[kind](job, *arguments)


def _judge_keys(job: SmallJob, calls: Sequence[Any]) -> Verdict:
    """Hold arms against others: a call has its kind, its steps, and the folders of its arms."""
    verdict = Verdict()
    in_fp32 = functools.partial(_in_fp32, job)
    for kind, steps, *folders in calls:
        for step in range(1, steps + 1):
            if kind in ("equal", "dtypes") and not verdict.is_right:
                break
            found, *others = (read_step(folder, step) for folder in folders)
            if kind == "rounding":
                judge_rounding(verdict, found, others[0], in_fp32())
            elif kind == "lossy":
                judge_lossy(verdict, found, others[0], others[1], in_fp32)
            elif kind == "dtypes":
                judge_dtypes(verdict, found, in_fp32())
            else:
                verdict.step = step
                judge_equal(verdict, found, *others)
                if verdict.is_right:
                    try_canary(functools.partial(judge_equal, right=others[0]), found, step)
    return verdict


def _in_fp32(job: SmallJob) -> dict[str, torch.Tensor]:
    """Gradients of the first step, with the attention that arms in the job's dtypes have."""
    if (step := _first_steps.get("fp32")) is None:
        step = _first_steps["fp32"] = Reference(job, 0, torch.float32, masks=False).step(1)
    return {f"grad:{name}": grad for name, grad in step.grads.items()}


def rounding_keys(config: Any) -> list[str]:
    """Keys of a config that change the order of sums; Titan's own loss may be compiled."""
    found = _keys_that_change(config, lambda facts: facts.effect is ROUNDING and not facts.narrow)
    return [key for key in found if key != COMPILE or compiles_model(config.compile)]


def lossy_keys(config: Any) -> list[str]:
    """Keys of a config with which it keeps or sends fewer bits."""
    found = _keys_that_change(config, lambda facts: facts.effect is LOSSY or facts.narrow)
    policy = config.activation_checkpoint
    if isinstance(policy, FP8AC.Config) and policy.wants_float8():
        found.append(POLICY)
    return found


def _keys_that_change(config: Any, wanted: Callable[[KeyFacts], bool]) -> list[str]:
    """Keys of a config whose values change results, of those whose facts are ``wanted``."""
    values = ((key, facts, value_of(config, key)) for key, facts in FACTS.items() if wanted(facts))
    return [k for k, facts, value in values if facts.is_on(value) and not facts.is_same(value)]


def _check_routing(job: SmallJob, loads: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if the first experts do not get what ``job.routing`` says."""
    tokens = {"idle": 0, "skewed": job.samples.step * job.samples.length}.get(job.routing)
    if tokens is not None and {int(load_E[0]) for load_E in loads.values()} != {tokens}:
        raise ValueError(
            f"--routing {job.routing} needs a bias for each expert (load_balance_coeff)."
        )


_first_steps: dict[int | str, Any] = {}
"""What the reference computes in the first step, by seed, and in fp32 with the attention of the
job's dtypes: arms of other keys need it again."""


@dataclass
class _Axes:
    """The judge of an arm in fp32."""

    job: SmallJob
    arm: Arm
    balances: bool
    """True if the job has biases of experts that follow their loads."""

    def __post_init__(self) -> None:
        self.right = Reference(self.job, self.arm.seed, torch.float64)
        self.narrow = Reference(self.job, self.arm.seed, torch.float32)
        groups = self.narrow.config.optimizer.param_groups
        updates = not any(group.optimizer_name == MUON for group in groups)
        self.optimizer = self.narrow.optimizer() if updates else None  # else it is not verified

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from a job's weights."""
        for model in (self.right, self.narrow):
            model.take(tensors)

    def steps(self, step: int) -> tuple[Step, Step]:
        """A step in fp64, and in fp32."""
        if step == 1 and (known := _first_steps.get(self.arm.seed)) is not None:
            return known
        expected = self.right.step(step)
        _check_routing(self.job, expected.loads)
        steps = expected, self.narrow.step(step, expected)
        if step == 1:
            _first_steps[self.arm.seed] = steps
        return steps

    def judge(
        self,
        verdict: Verdict,
        found: Mapping[str, torch.Tensor],
        seen: Mapping[str, Any],
        step: int,
        steps: tuple[Step, Step],
    ) -> None:
        """Hold what a job left of a step against the reference's, and the update against ours."""
        expected, rounded = steps
        judge = functools.partial(judge_step, seen=seen, step=step, right=expected, narrow=rounded)
        rounding = judge(verdict, found)
        if verdict.is_right:
            try_canary(judge, found, self.arm.seed + step, rounding)
        biases = self.right.expected_biases(expected) if self.balances else {}
        for name, bias in biases.items():
            verdict.judge("bias", name, of_kind(found, "bias").get(name), bias, 1e-6)
        if self.optimizer is not None:
            before = self.narrow.weights()
            updated = self.narrow.update(self.optimizer, of_kind(found, "grad"))
            judge_update(verdict, before, of_kind(found, "param"), updated)


def _judge_axes(job: SmallJob, arm: Arm, folder: Path, seen: dict[str, Any]) -> Verdict:
    verdict = Verdict()
    verdict.note_apart(seen["apart"])
    axes = _Axes(job, arm, seen["balances"])
    if axes.optimizer is None:
        verdict.notes.append(f"{'optimizer':10}not verified: {MUON}")
    for step in range(1, arm.steps + 1):
        verdict.step = step
        found = read_step(folder, step)
        axes.judge(verdict, found, seen, step, axes.steps(step))
        if not verdict.is_right:
            break
        axes.take(found)
    return verdict


def _judge_resume(
    job: SmallJob, verdict: Verdict, arm: Arm, saved: Trained, resumed: list[tuple[str, Trained]]
) -> Verdict:
    """Hold loaded states against saved ones, and the step after that as the others before it."""
    axes = _Axes(job, arm, saved.seen["balances"])
    before = [read_step(saved.folder, step) for step in range(1, STEPS + 1)]
    axes.take(before[-1])
    steps = axes.steps(STEPS + 1)
    for where, (folder, seen) in resumed:
        each = Verdict()
        each.note_apart(seen["apart"])
        judge_loaded(each, read_step(folder, STEPS), before[-1])
        loaded, right = (torch.tensor(float(n)) for n in (seen["loaded"], STEPS))
        each.judge("resume", "the step count", loaded, right, 0.0)
        if axes.optimizer is not None:  # as it is after the same steps in one process
            axes.optimizer = axes.narrow.optimizer()
            fill_model([axes.narrow.model], arm.seed, job.routing)
            for tensors in before:
                axes.narrow.update(axes.optimizer, of_kind(tensors, "grad"))
                axes.narrow.take(tensors)
        said = {key: saved.seen[key] + seen[key] for key in ("loss", "norm")}
        axes.judge(each, read_step(folder, STEPS + 1), said, STEPS + 1, steps)
        verdict.take(each, where)
    return verdict


_JUDGES: dict[str, Callable[..., Verdict]] = {
    "axes": _judge_axes,
    "keys": _judge_keys,
    "graphs": lambda job, *arguments: judge_replay(*arguments),
    "resume": _judge_resume,
}
