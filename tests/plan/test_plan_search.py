"""What ``titan_ext tune`` searches, how it prices it, and what it writes."""

import copy
import itertools
import json
import multiprocessing
import os
import signal
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.cluster import run_command, run_ranks
from tests.helpers.toml_files import DEBUG, Loader
from titan_ext.activation_checkpoint import FP8AC
from titan_ext.base import no_accelerator
from titan_ext.base.facts import Effect
from titan_ext.config_registry.resolve import resolve
from titan_ext.config_registry.tune import Tune
from titan_ext.parallelize.keys import effect_of
from titan_ext.plan import tuned
from titan_ext.plan.dry_run import dry_run
from titan_ext.plan.forks import FailedError, Forks, _received
from titan_ext.plan.memory import BANDS, CONTEXT, JobClass, MemoryKind, MemoryPlan, Peak
from titan_ext.plan.moves import (
    EP,
    GLOBAL,
    LOCAL,
    MOVES,
    REPLICATE,
    SCORES,
    Facts,
    _batches,
    _ep,
    _replicate,
    keys_of,
    with_move,
)
from titan_ext.plan.search import (
    Checkpointing,
    Job,
    Plan,
    Search,
    Sketch,
    with_best_checkpointing,
    with_defaults,
)
from titan_ext.plan.shorten import Depths, NotAlikeError, cut, whole_memory, whole_of
from titan_ext.plan.stand_ins import as_rank
from titan_ext.plan.time import Category, StepTime
from titan_ext.toml.convert import dump, identity
from titan_ext.toml.files import to_toml

GIB = 2**30


# -- a shortened model


def _two_depths(folder: Path) -> Any:
    """Plans of a debug model of ten layers, and of the two that ``Depths`` cuts it to."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def config() -> Any:
        made: Any = resolve(folder / "run.toml").config
        layers = made.model_spec.model.layers
        made.model_spec.model.layers = layers + [copy.deepcopy(layers[-1]) for _ in range(4)]
        return made

    def plan(layers: int) -> Any:
        made = config()
        cut(made, layers)
        run = dry_run(made, 8, 0, memory=GIB, machine="h100")
        return run.memory, run.time

    depths: Any = Depths.of(config())
    assert depths is not None
    with as_rank(8, 0), Forks(plan, 2) as forks:
        found = dict(forks.run([(depths.short,), (depths.longer,), (depths.whole,)]))
    return depths, [found[at] for at in range(3)]


def test_two_depths_make_the_plan_of_the_whole_model(tmp_path: Path):
    """Milliseconds by category, and bytes by kind at the peak, which is in the same phase.

    Waits of a step of 10 ms are less even than those of a large one, which is within 0.3%.
    """
    (tmp_path / "run.toml").write_text(_RUN)
    (found,) = run_ranks(_two_depths, 1, tmp_path, log_folder=tmp_path)
    depths, (short, longer, whole) = found
    assert (depths.whole, depths.short, depths.longer) == (10, 4, 6)
    memory, time = (
        whole_memory(short[0], longer[0], depths),
        whole_of(short[1], longer[1], depths),
    )
    assert time.step_ms == pytest.approx(whole[1].step_ms, rel=0.025)
    assert short[1].step_ms < 0.7 * whole[1].step_ms
    for category in (Category.FORWARD, Category.BACKWARD, Category.RECOMPUTE):
        assert time.ms[category] == pytest.approx(whole[1].ms[category], rel=0.01)
    assert memory.peak.nbytes == pytest.approx(whole[0].peak.nbytes, rel=0.001)
    assert memory.peak.phase == whole[0].peak.phase
    # The allocator reserves segments of 2 MiB and 20 MiB in each pool, not bytes in a line.
    assert memory.spare == pytest.approx(whole[0].spare, abs=40 * 2**20)
    for kind in (MemoryKind.EXACT, MemoryKind.GRADIENTS, MemoryKind.STATES):
        assert memory.peak.by_kind[kind] == pytest.approx(whole[0].peak.by_kind[kind], rel=0.001)


def _solved_and_planned(folder: Path) -> Any:
    """The least checkpointing of a step of four passes, of two blocks, and plans with it: in the
    process that solved it and planned a block's units, and in one of its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with as_rank(2, 0):
        whole = Tune("moe_debug.toml", 2, memory="8GiB").search([], folder)[0].job

        def make(keys: Mapping[str, Any]) -> Any:
            config = whole.make(keys)
            cut(config, 2)
            return config

        job = replace(whole, make=make, depths=None)
        keys = {LOCAL: 1, GLOBAL: 8}

        def call(solves: bool, keys: Mapping[str, Any]) -> Any:
            return job.solver(keys)(0) if solves else job.step(keys)

        with Forks(call, 1) as forks:
            every = (True, keys), (False, {**keys, "parallelism.fsdp_wrap": "block"})
            (_, solved), (_, other) = forks.run(every)
            assert not isinstance(other, FailedError), other  # or its process would be no more
            again = False, job.all_keys(keys, solved)
            ((_, later),) = forks.run([again])
        with Forks(call, 1) as forks:
            ((_, alone),) = forks.run([again])
        return solved, later, alone


def test_a_plan_is_the_same_after_others_in_its_process(tmp_path: Path):
    ((solved, later, alone),) = run_ranks(_solved_and_planned, 1, tmp_path, log_folder=tmp_path)
    assert later == alone
    # The solver's recompute is of all passes of a step.
    recomputed_ms = later[1].ms[Category.RECOMPUTE]
    assert solved.ms == pytest.approx(recomputed_ms, rel=0.2)
    assert recomputed_ms > 0


_RUN = """extends = "deepseek_v3.deepseek_v3_debugmodel"
[training]
local_batch_size = 2
seq_len = 256
disable_cuda_graphs = true
[parallelism]
expert_parallel_degree = 2
[activation_checkpoint]
policy = "selective"
"""


def _depths(kinds: str, pipeline: int = 1) -> Depths | None:
    """Of a model whose layers are of these kinds; initialisers differ in all of them."""
    layers = [_Layer(kind, index) for index, kind in enumerate(kinds)]
    spec = SimpleNamespace(model=SimpleNamespace(layers=layers))
    parallelism = SimpleNamespace(pipeline_parallel_degree=pipeline)
    return Depths.of(SimpleNamespace(model_spec=spec, parallelism=parallelism))


@dataclass
class _Layer:
    kind: str
    param_init: int


@pytest.mark.parametrize(
    ("kinds", "short", "longer", "stands_for"),
    [
        ("d" * 3 + "m" * 58, 6, 8, [1, 1, 1, 56, 1, 1]),
        ("m" * 48, 3, 5, [46, 1, 1]),
        ("sf" * 12, 6, 10, [10, 10, 1, 1, 1, 1]),
        ("d" + "sf" * 12 + "s", 8, 12, [1, 10, 10, 1, 1, 1, 1, 1]),
    ],
)
def test_layers_repeat(kinds: str, short: int, longer: int, stands_for: list[int]):
    depths = _depths(kinds)
    assert depths is not None
    assert (depths.whole, depths.short, depths.longer) == (len(kinds), short, longer)
    assert [depths.stands_for(layer) for layer in range(short)] == stands_for
    assert sum(stands_for) == len(kinds)
    for kind in set(kinds):  # of each kind as many as the model has
        there = sum(n for n, found in zip(stands_for, kinds, strict=False) if found == kind)
        assert there == kinds.count(kind)


def test_what_is_not_shortened():
    """Few layers, layers without a period, and a pipeline, whose stages name their layers."""
    assert _depths("dmmmm") is None
    assert _depths("abcdefghijkl") is None
    assert _depths("m" * 48, pipeline=2) is None


def test_other_phases_are_not_alike():
    phases = [Peak(1, "start", {}), Peak(2, "forward of layers.0", {})]
    plan = MemoryPlan(9, phases[1], phases, 0, frozenset())
    depths = _depths("m" * 9)
    assert depths is not None
    with pytest.raises(NotAlikeError):
        whole_memory(plan, replace(plan, phases=phases[:1]), depths)


# -- forks


def test_calls_run_at_once_and_a_failure_is_a_result(tmp_path: Path):
    ((found, errors, counts),) = run_ranks(_forked, 1, log_folder=tmp_path)
    assert found == {0: 4, 2: 81}
    assert errors == {
        1: "no 7",
        3: "its process ended without a result; is the machine out of memory?",
    }
    assert counts == (4, 4)


def test_a_process_that_dies_with_its_call_unread_is_a_failure():
    """Its line is reset, where that of one which has read ends."""
    line, its = multiprocessing.Pipe()
    line.send(1)
    its.close()
    assert isinstance(_received(line), FailedError)


def _forked() -> Any:
    def square(number: int) -> int:
        if number == 7:
            raise ValueError("no 7")
        if number == 3:
            os._exit(0)
        return number**2

    with Forks(square, 2) as forks:
        found = dict(forks.run([(2,), (7,), (9,), (3,)]))
    errors = {at: str(one) for at, one in found.items() if isinstance(one, FailedError)}
    found = {at: one for at, one in found.items() if at not in errors}
    return found, errors, (forks.called, forks.planned)


def test_a_fork_makes_calls_that_are_alike(tmp_path: Path):
    """All of a kind before it makes room for another, and none after a failure."""
    ((pids, last),) = run_ranks(_kinds, 1, log_folder=tmp_path)
    a, other, failed, b, again = (pids[at] for at in range(5))
    assert a == b
    assert isinstance(failed, FailedError)
    assert len({a, other, again}) == 3
    assert last == again, "a later call finds it warm"


def _kinds() -> Any:
    def process(kind: str, is_wrong: bool = False) -> int:
        if is_wrong:
            raise ValueError("wrong")
        return os.getpid()

    with Forks(process, 1, lambda kind, *_: kind) as forks:
        found = dict(forks.run([("a",), ("b",), ("b", True), ("a",), ("b",)]))
        ((_, last),) = forks.run([("b",)])
    for pid in (found[0], last):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return found, last


# -- the search, on a step that is a formula


@dataclass
class _Inline:
    """``Forks`` without processes."""

    function: Any
    calls: list[Any] = field(default_factory=list)
    called: int = 0
    planned: int = 0

    def run(self, calls: Any) -> Any:
        self.calls += calls
        self.planned += len(calls)
        for at, call in enumerate(calls):
            result = self.function(*call)
            self.called += 1
            yield at, result

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_VALUES = {
    LOCAL: 4,
    GLOBAL: 256,
    EP: 8,
    REPLICATE: 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.fsdp_wrap": "auto",
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.overlap_exchanges": "shared_experts",
    "parallelism.exchange_dtype": None,
}
_FACTS = Facts(ranks=64, ranks_per_node=8, experts=64)
_SOLVED = [
    Checkpointing(nbytes=n * GIB, ms=400 / n, table={"*": f"{n}"}, ms_of_a_byte=100 / n**2 / GIB)
    for n in (1, 2, 3, 5, 8, 12, 20, 32)
]
_SOLVED.append(Checkpointing(nbytes=48 * GIB, ms=0.0, table={}))


def _step(now: Mapping[str, Any]) -> tuple[dict[Category, float], float]:
    """Milliseconds by category, and GiB without activations; the latter are of 4 sequences."""
    local, ep, copies = now[LOCAL], now[EP], now[REPLICATE]
    passes = now[GLOBAL] // 64 / local
    exchanges = 30.0 * (1 if ep <= 8 else 4) * (1 - 1 / ep)
    exchanges *= 0.55 if now["parallelism.exchange_dtype"] == "float8" else 1
    if now["parallelism.overlap_exchanges"] == "halves":
        exchanges *= 0.4
    never = now["parallelism.fsdp_reshard_after_forward"] == "never"
    gathers = (40.0 if never else 70.0) * passes / copies * (8 / ep) ** 0.5
    ms = {
        Category.FORWARD: 100 * (1 + 0.1 / local),
        Category.BACKWARD: 200 * (1 + 0.1 / local),
        Category.EXCHANGES: exchanges * 4,
        Category.GATHERS: gathers,
        Category.REDUCTIONS: 20 * passes,
        Category.RECOMPUTE: 0.0,
    }
    return ms, 14.0 + 6 * copies + (12 if never else 0) + 3 * 8 / ep


def _price(values: Mapping[str, Any], keys: Mapping[str, Any], solved: Any = _SOLVED[2]) -> Any:
    """Of a config with a checkpointing; the user's own is the third."""
    now = {**values, **keys}
    if now[EP] * now[REPLICATE] > 64:
        return FailedError("too many ranks")
    ms, base = _step(now)
    ms[Category.RECOMPUTE] = solved.ms
    held = solved.nbytes * now[LOCAL] // 4
    kinds = {MemoryKind.EXACT: held, MemoryKind.PARAMETERS: int(base * GIB)}
    peak = Peak(sum(kinds.values()), "loss", kinds)
    time = StepTime("h100", ms, now[GLOBAL] // 64 * 4096, None, expected=ms)
    return Plan(MemoryPlan(60 * GIB + CONTEXT, peak, [peak], 0, frozenset()), time)


def _search(
    changed: Mapping[str, Any] | None = None,
    *,
    exact: bool = False,
    depths: Depths | None = None,
    whole: FailedError | None = None,
    runs: bool = True,
) -> Search:
    """``whole`` is what comes of a whole model, if not its plan."""
    values = with_defaults(_VALUES) | dict(changed or {})
    job = Job(
        make=lambda keys: None,
        values=values,
        facts=_FACTS,
        memory=60 * GIB,
        machine="h100",
        exact=exact,
        depths=depths,
    )

    def plan(
        keys: Mapping[str, Any], room: int | None, at_most: float, is_whole: bool, best: Any
    ) -> Any:
        found = _price(values, keys)
        if is_whole and whole is not None:
            return whole
        if room is None or isinstance(found, FailedError):
            return found
        local = {**values, **keys}[LOCAL]
        every = [replace(one, nbytes=one.nbytes * local // 4) for one in _SOLVED]

        def solve(budget: int) -> Checkpointing:
            return next((x for x in reversed(every) if x.nbytes <= budget), every[0])

        def step(solved: Checkpointing) -> Plan:
            (here,) = (x for x in _SOLVED if x.table == solved.table)
            return _price(values, keys, here)._replace(checkpointing=solved)

        return with_best_checkpointing(room, solve, step, at_most)

    forks: Any = _Inline(plan)
    search = Search(job, forks)
    if runs:
        search.run()
    return search


def _best_of_all(values: Mapping[str, Any]) -> float:
    """The least milliseconds of every config of the grid that the moves span, and that fits."""
    grid = {
        LOCAL: (1, 2, 4),
        EP: (1, 2, 4, 8, 16, 32, 64),
        REPLICATE: (1, 2, 4, 8, 16, 32),
        "parallelism.fsdp_reshard_after_forward": ("default", "never", "always"),
        "parallelism.overlap_exchanges": ("shared_experts", "halves"),
        "parallelism.exchange_dtype": (None, "float8"),
    }
    best = float("inf")
    for chosen in itertools.product(*grid.values()):
        keys = dict(zip(grid, chosen, strict=True))
        if keys[LOCAL] == 1 and keys["parallelism.overlap_exchanges"] == "halves":
            continue
        for solved in _SOLVED:
            found = _price(values, keys, solved)
            if not isinstance(found, FailedError) and found.fits:
                best = min(best, found.time.expected_ms)
    return best


@pytest.mark.parametrize("start", [{}, {EP: 64, LOCAL: 1}])
def test_nothing_of_a_grid_is_better(start: dict[str, Any]):
    search = _search(start)
    assert search.winner is not None
    assert search.winner.plan is not None
    assert search.winner.fits
    least = _best_of_all(search.job.values)
    assert search.winner.plan.time.expected_ms <= 1.01 * least
    assert search.own.plan is not None
    assert least < 0.9 * search.own.plan.time.expected_ms


def test_the_expected_figure_decides_and_is_printed_first():
    """An ideal host takes no time, and ideal kernels less: a late host may decide otherwise."""
    ideal = {Category.FORWARD: 60.0, Category.RECOMPUTE: 30.0}
    late = {Category.FORWARD: 60.0, Category.RECOMPUTE: 30.0, Category.HOST: 30.0}
    time = StepTime("h100", ideal, 1000, None, expected=late)
    memory = _search().own.planned.memory
    ms = {Category.FORWARD: 60.0, Category.EXCHANGES: 40.0}
    waits = replace(time, ms=ms, expected=ms)
    fewer, more = Plan(memory, waits), Plan(memory, time)
    assert waits.step_ms > time.step_ms
    assert fewer.order < more.order
    search = _search()
    _, first, *_ = tuned.report(search)
    both = [one.planned.time.expected_tokens_per_second for one in (search.own, search.best)]
    assert first.startswith("expect tokens/s a GPU (+-26%) ")
    assert first.split()[-2:] == [f"{speed:,.0f}" for speed in both]


def test_progress_ends():
    """Each phase has an estimate, and with the last plan nothing is left."""
    search, left = _search(runs=False, depths=_depths("m" * 48)), []
    search.say = lambda text: left.append((text, *search.work(), search.progress()))
    search.run()
    assert search.work() == (len(search.forks.calls), 0)  # type: ignore[attr-defined]
    *_, (words, done, last, text) = left
    assert words == "whole models"
    assert last == 2 * (1 + 48 // 8) - 1, "they count for as many as they take"
    assert text.startswith(f"{done} plans of about {done + last}, about ")
    assert f"best: expect {search.best.planned.time.expected_tokens_per_second:,.0f}" in text


def test_a_signal_gives_the_best_so_far(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """SIGTERM as Ctrl-C, and it is again what it was before."""
    (folder / "mine.toml").write_text(DEBUG)
    before = signal.getsignal(signal.SIGTERM)
    search = _search(runs=False)
    run = search.forks.function

    def plan(*call: Any) -> Any:
        if search.forks.called == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(*call)

    search.forks.function = plan
    monkeypatch.setattr(Tune, "search", lambda *_: (search, {}))
    Tune("mine.toml", 64, out=folder / "found").run([])
    out = capsys.readouterr().out
    assert out.startswith("stopped: the best so far")
    assert search.winner is None
    assert f"{search.best.planned.time.expected_tokens_per_second:,.0f}" in out.splitlines()[2]
    assert {path.name for path in (folder / "found").iterdir()} == {"tuned.json", "tuned.toml"}
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("forward", "recompute", "spare", "is_lost"),
    [
        (100.0, 20.0, 5, True),  # as the best: another word for the same
        (99.0, 20.0, 5, False),
        (101.0, 20.0, 6, False),  # what it frees may be worth more
        (121.0, 20.0, 6, True),  # not even if all recompute went
    ],
)
def test_what_cannot_win_is_planned_no_further(
    forward: float, recompute: float, spare: int, is_lost: bool
):
    job = _search(runs=False).job
    job = replace(job, depths=_depths("m" * 48), make=lambda keys: None)
    planned = []

    def step(keys: Any, layers: int = 0) -> Any:
        planned.append(layers)
        ms = {Category.FORWARD: forward, Category.RECOMPUTE: recompute}
        peak = Peak(0, "loss", {})
        memory = MemoryPlan(CONTEXT + spare, peak, [peak], 0, frozenset())
        return memory, StepTime("h100", ms, 1000, None, expected=ms)

    object.__setattr__(job, "step", step)
    best = Sketch(us=120.0, recompute_us=20.0, spare=5)
    found = job.plan({}, None, best=best)
    assert isinstance(found, str) == is_lost
    assert planned == ([3] if is_lost else [3, 5])
    planned.clear()
    assert isinstance(job.plan({}, None), Plan), "a plan that is needed for its figure"
    assert planned == [3, 5]
    compiled = {"compile.enable": True, "compile.components": ["model"]}
    own = job.plan(compiled, GIB)
    assert isinstance(own, Plan), "no table is solved, for which there would have to be a config"
    assert own.checkpointing is None


def test_what_was_lost_is_planned_where_its_figure_is_asked_for():
    search, asked = _search(), []
    run, choices = search.forks.function, {MOVES[0]: {EP: 2, LOCAL: 2}}

    def plan(*call: Any) -> Any:
        asked.append(call[-1])
        return run(*call) if call[-1] is None else "saves nothing"

    sketch = Sketch(us=1.0, recompute_us=0.0, spare=0)
    best = replace(search.best, plan=search.best.planned._replace(sketch=sketch))
    search.forks.function, search.winner = plan, best
    (lost,) = search.evaluate([choices], GIB, to_win=True)
    assert (lost.plan, lost.reason, lost.is_lost) == (None, "saves nothing", True)
    (again,) = search.evaluate([choices], GIB, to_win=True)
    assert again is lost
    (found,) = search.evaluate([choices], GIB)
    assert found.plan is not None
    assert asked == [sketch, None]


def test_what_does_not_fit_is_made_to():
    """A start that lacks memory ends with a config that fits."""
    search = _search({REPLICATE: 8})
    assert not search.own.fits
    assert search.best.fits
    assert any("does not fit" in line for line in tuned.report(search))


def test_a_config_that_does_not_start_as_a_whole_model_is_refused_with_its_reason():
    """A shortened one reads no checkpoint."""
    depths = _depths("m" * 48)
    assert _search(depths=depths).own.plan is not None
    with pytest.raises(ValueError, match="of another model"):
        _search(depths=depths, whole=FailedError("the checkpoint is of another model"))


def _planned(room: int, at_most: float = float("inf"), spare: int = 20 * GIB) -> list[float]:
    """GiB of the budgets that are planned, of which the last one is taken, in such a memory."""
    tried = []

    def solve(budget: int) -> Checkpointing:
        return Checkpointing(
            nbytes=max(budget, GIB), ms=400 * GIB / max(budget, GIB), table={"": ""}
        )

    def step(solved: Checkpointing) -> Plan:
        tried.append(solved.nbytes)
        peak = Peak(solved.nbytes, "loss", {MemoryKind.EXACT: solved.nbytes})
        device = round((1 + BANDS[JobClass.EAGER]) * spare) + CONTEXT
        memory = MemoryPlan(device, peak, [peak], 0, frozenset())
        ms = {Category.FORWARD: 100.0, Category.RECOMPUTE: solved.ms}
        return Plan(memory, StepTime("h100", ms, 1000, None, expected=ms), solved)

    found = with_best_checkpointing(room, solve, step, at_most)
    assert found.checkpointing is not None
    taken = [found.checkpointing.nbytes] if found.fits else []
    return [round(nbytes / GIB, 1) for nbytes in tried + taken]


def test_the_largest_budget_that_fits_is_taken():
    assert _planned(20 * GIB) == [20, 20]
    assert _planned(10 * GIB) == [10, 20, 20]
    assert _planned(40 * GIB) == [40, 20, 20]
    assert _planned(10 * GIB, spare=GIB // 2) == [10, 1], "the least, which does not fit"
    # 10 GiB ideally take 140 us a token, and 20 GiB would take 120.
    assert _planned(10 * GIB, at_most=119.0) == [10, 10]
    assert _planned(10 * GIB, at_most=121.0) == [10, 20, 20]


def test_exact_changes_no_result():
    search = _search(exact=True)
    effects = {effect_of(one.keys, search.job.values) for one in search.tried}
    assert effects == {Effect.NONE}
    assert {"overlap_exchanges", "exchange_dtype", "enable"}.isdisjoint(
        key.rpartition(".")[2] for one in search.tried for key in one.keys
    )
    assert any(one.keys for one in search.tried)
    solved = [(x.keys, x.checkpointing) for x in search.tried if x.checkpointing]
    exempt = [search.job.all_keys(*both)[_EXEMPT] for both in solved if both[1].table]
    assert exempt == [["*"]] * len(exempt) != []


_EXEMPT = "activation_checkpoint.exempt"


def test_a_move_that_acts_on_nothing_is_not_tried():
    """Nothing of the formula waits for the host, for its copies or its loss."""
    search = _search()
    tried = {key for one in search.tried for key in one.keys}
    assert {LOCAL, EP, REPLICATE, "parallelism.exchange_dtype"} <= tried
    one = _search({"parallelism.exchange_dtype": "float8", EP: 1})
    assert not any("exchange_dtype" in key for x in one.tried for key in x.keys)


def test_nothing_is_planned_twice():
    """But for the two that are planned as whole models in the end."""
    search = _search()
    asked = [repr((sorted(x[0].items(), key=str), x[1] is None)) for x in search.forks.calls]  # type: ignore[attr-defined]
    assert len(set(asked[:-2])) == len(asked) - 2
    backwards = [one for move, one in search.without.items() if move is not None]
    assert backwards
    assert all(one.checkpointing is not None for one in backwards)


def test_the_users_checkpointing_has_no_keys_of_float8():
    keys = {SCORES: True, EP: 4}
    assert _search().job.all_keys(keys, None) == {EP: 4}
    search = _search({"activation_checkpoint.policy": "fp8"})
    assert search.job.all_keys(keys, None) == keys


def test_every_change_that_saves_nothing_is_taken_back():
    search = _search()
    best = search.best
    for move, one in search.without.items():
        if move is not None and move in best.choices:
            assert not one.fits or one.us_per_token > best.us_per_token


# -- moves


def test_every_change_is_a_file_that_loads(config: Loader, folder: Path):
    """Beside the whole config, whose own values of a section that changes are no mistake."""
    now = config(DEBUG + "[parallelism]\nexpert_parallel_degree = 2\n[training]\n" + _BATCH)
    (folder / "config.toml").write_text(dump(now))
    facts = Facts(8, 4, experts=8, is_batch_free=True, host_nbytes=GIB)
    values = with_defaults(identity(now))
    tried = [change for move in MOVES for change in move.changes(values, facts)]
    assert len(tried) > 12
    for change in tried:
        solved = Checkpointing(nbytes=GIB, ms=0.0, table={"*": "recompute"})
        checkpointed = any(key.startswith("activation_") for key in change)
        keys = {**(solved.keys(values, with_budget=True) if checkpointed else {}), **change}
        lines = [f"{key} = {to_toml(value)}" for key, value in keys.items()]
        (folder / "changed.toml").write_text("\n".join(['extends = "config.toml"', *lines]))
        if "training.disable_cuda_graphs" in change:  # the checks of a config refuse them
            refused = pytest.raises(ValueError, match="expert_parallel_degree is 2")
            with no_accelerator.as_with_an_accelerator(), refused:
                resolve("changed.toml")
            continue
        values_now = resolve("changed.toml").values
        assert {key: values_now[key] for key in change} == change


@pytest.mark.parametrize(
    ("table", "keys"),
    [({"*": "recompute"}, "mode = 'full'"), ({"*": "recompute"}, "budget = '1GiB'"), ({}, "")],
)
def test_a_checkpointing_is_a_file_that_loads_over_any_policy(
    table: dict[str, str], keys: str, config: Loader, folder: Path
):
    """As a table, and as the budget that a person's file gets."""
    now = config(DEBUG + f"[activation_checkpoint]\npolicy = 'fp8'\n{keys}\n")
    (folder / "config.toml").write_text(dump(now))
    values = with_defaults(identity(now))
    solved = Checkpointing(nbytes=9, ms=1.0, table=table)
    for made in (solved.keys(values), solved.keys(values, with_budget=True)):
        lines = [f"{key} = {to_toml(value)}" for key, value in made.items()]
        (folder / "changed.toml").write_text("\n".join(['extends = "config.toml"', *lines]))
        policy: Any = resolve("changed.toml").config.activation_checkpoint
        if not table:
            assert policy is None
        elif made.get(_TABLE):
            assert policy == FP8AC.Config(preset="stock", op_policies=table)
        else:
            assert policy == FP8AC.Config(budget="1MiB")


_TABLE = "activation_checkpoint.op_policies"
_BATCH = "local_batch_size = 2\nglobal_batch_size = 32\n"


def test_a_batch_keeps_the_tokens_of_a_step(config: Loader):
    text = DEBUG + "[parallelism]\ntensor_parallel_degree = 2\n[training]\nlocal_batch_size = 6\n"
    same, free = Facts(8, 8, 8), Facts(8, 8, 8, is_batch_free=True)
    now = with_defaults(identity(config(text)))
    assert list(_batches(now, same)) == [{LOCAL: 3, GLOBAL: 24}]
    more = [{LOCAL: local, GLOBAL: 4 * local} for local in (48, 24, 12)]
    assert list(_batches(now, free)) == [*more, {LOCAL: 3, GLOBAL: 24}]
    now = with_defaults(identity(config(text + "global_batch_size = 48\n")))
    assert list(_batches(now, same)) == [{LOCAL: 12, GLOBAL: 48}, {LOCAL: 3, GLOBAL: 48}]
    now = with_defaults(identity(config(text.replace("6", "5"))))
    assert list(_batches(now, same)) == []


def test_degrees_divide_experts_and_ranks():
    now = {**_VALUES, EP: 8, REPLICATE: 2}
    assert [change[EP] for change in _ep(now, _FACTS)] == [1, 2, 4, 16, 32]
    assert [change[EP] for change in _ep({**now, EP: 32}, _FACTS)] == [4, 8, 16]
    assert [change[EP] for change in _ep(now, replace(_FACTS, experts=24))] == [1, 2, 4]
    assert list(_ep(now, replace(_FACTS, experts=0))) == []
    assert [change[REPLICATE] for change in _replicate(now, _FACTS)] == [1, 4, 8]
    assert [change[REPLICATE] for change in _replicate({**now, EP: 32}, _FACTS)] == [1]


def test_a_later_move_wins_a_key():
    batch, ep = MOVES[:2]
    choices = with_move(with_move({}, batch, {LOCAL: 2, GLOBAL: 64}), ep, {EP: 4})
    assert keys_of(choices, _VALUES) == {LOCAL: 2, GLOBAL: 64, EP: 4}
    assert keys_of(with_move(choices, batch, {LOCAL: 4, GLOBAL: 256}), _VALUES) == {EP: 4}
    assert keys_of(with_move(choices, ep, {LOCAL: 8}), _VALUES) == {LOCAL: 8, GLOBAL: 64}


# -- what it writes


def test_the_file_says_what_each_change_saves(folder: Path, config: Loader):
    (folder / "mine.toml").write_text(DEBUG)
    search = _search()
    lines = tuned.file_lines(search, "mine.toml", {"training.steps": "7"}, "titan_ext tune")
    table = tomllib.loads("\n".join(lines))
    assert table["extends"] == "mine.toml"
    assert table["training"]["steps"] == 7
    budget = table["activation_checkpoint"]["budget"]
    assert search.best.checkpointing is not None
    assert budget == f"{search.best.checkpointing.nbytes // 2**20}MiB"
    comments = [line for line in lines if line.startswith("# saves")]
    assert len(comments) == len(list(tuned.changes(search))) >= 3
    ms = sum(float(line.split()[2].replace(",", "")) for line in comments)
    assert ms > 0


def test_figures():
    search = _search()
    found = json.loads(json.dumps(tuned.to_json(search)))
    assert len(found["tried"]) == len(search.tried)
    expected = [x["expected_ms"] for x in found["tried"] if x.get("fits")]
    assert found["best"]["expected_ms"] == min(expected)


@pytest.mark.slow
def test_the_command_from_end_to_end(folder: Path):
    """The file that it writes is planned as it says: by a dry run, which solves its budget."""
    options = ("--ranks", "4", "--memory", "4GiB")
    done = run_command(
        folder,
        "tune",
        "moe_debug_gpu.toml",
        *options,
        "--exact",
        "--processes",
        "2",
        "--out",
        "my",
    )
    assert (done.code, done.error) == (0, "")
    files = sorted(path.name for path in (folder / "my").iterdir())
    assert files == ["tuned.json", "tuned.toml"]
    found = json.loads((folder / "my" / "tuned.json").read_text())
    assert found["best"]["fits"]
    assert found["best"]["is_whole"]
    assert found["best"]["step_ms"] <= found["own"]["step_ms"] or not found["own"]["fits"]
    planned = run_command(
        folder, "dry-run", "my/tuned.toml", *options, "--machine", "h100", "--out", "p"
    )
    assert planned.code == 0, planned.error
    plan = json.loads((folder / "p" / "plan_rank0.json").read_text())
    assert plan["time"]["step_ms"] == pytest.approx(found["best"]["step_ms"], rel=0.01)
    assert plan["peak"]["sum"] == pytest.approx(found["best"]["peak"], rel=0.01)
