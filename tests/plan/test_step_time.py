"""`titan_ext dry-run --machine`: what the clock of a step counts, and how streams wait."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.tools.utils import get_peak_flops

from tests.helpers.cluster import run_ranks
from tests.helpers.training import Run, planned_config, start_as_planned
from titan_ext.activation_checkpoint import FP8AC, memory_report_of
from titan_ext.base.machines import KINDS, MACHINES, machine_toml
from titan_ext.plan.dry_run import _how, dry_run
from titan_ext.plan.live import LiveBytes, MemoryKind
from titan_ext.plan.op_cost import collective_ms, op_cost
from titan_ext.plan.schedules import Action, actions_of, idle_share, one_stage_actions
from titan_ext.plan.stand_ins import AttentionShapes, as_rank
from titan_ext.plan.time import EAGER, IDEAL, WAITS, Category, How, Pass, StepClock, StepTime

ONE = Run(world=1, ep=1, parallelize="block", seq_len=64, layers=2)
EIGHT = Run(world=8, ep=2, parallelize="submodule", global_batch=8, layers=2)


class Timed(NamedTuple):
    time: StepTime
    float8: int
    """Bytes that the float8 policy keeps, and those of what it keeps them of."""
    flops: Counter[Category]
    """FLOPs of the kernels that compute, and bytes that the codec read and wrote."""
    codec: int


def _counting(flops: Counter[Category], nbytes: Counter[Category]) -> Callable[..., None]:
    """``StepClock._run`` that adds up what the kernels on the compute stream cost."""
    real = StepClock._run

    def run(clock: Any, func: Any, stream: Any, args: Any, kwargs: Any, out: Any) -> None:
        if stream is clock.compute:
            cost = op_cost(func, args, kwargs, out, clock._machine)
            category = clock._category(func._schema.name)
            flops[category] += cost.flops
            nbytes[category] += cost.nbytes
        real(clock, func, stream, args, kwargs, out)

    return run


def _time(calls: Sequence[tuple[Run, dict[str, Any]]], folder: Path) -> list[Timed]:
    found = []
    with as_rank(calls[0][0].world, 0):
        for run, arguments in calls:
            given: dict[str, Any] = {"machine": "h100", **arguments}
            flops: Counter[Category] = Counter()
            nbytes: Counter[Category] = Counter()
            with mock.patch.object(StepClock, "_run", _counting(flops, nbytes)):
                done = dry_run(planned_config(run, folder), run.world, **given)
            assert done.time is not None
            rows = memory_report_of(done.model_parts).rows()
            kept = [row for row in rows if row.treatment.startswith("float8")]
            float8 = sum(row.nbytes + row.original_nbytes for row in kept)
            found.append(Timed(done.time, float8, flops, nbytes[Category.CODEC]))
    return found


def _timed(folder: Path, *calls: tuple[Run, dict[str, Any]]) -> list[Timed]:
    """Of dry runs with the same degrees, in one process: the later ones take half as long."""
    return run_ranks(_time, 1, calls, folder, log_folder=folder)[0]


def _count(run: Run, folder: Path) -> int:
    """FLOPs of a real step in Titan's trainer, by torch."""
    trainer, batches = start_as_planned(run, folder)

    def grouped_mm(a: Any, b: Any, *_: Any, **__: Any) -> int:
        return 2 * a[-2] * a[-1] * b[-1]

    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_mm}
    )
    with counter:
        trainer.train_step(batches)
    trainer.close()
    return counter.get_total_flops()


def test_the_flops_are_those_of_a_real_step(tmp_path: Path):
    on_a_cpu = {"as_on_a_gpu": False}
    planned = _timed(tmp_path, *((replace(ONE, ac=ac), on_a_cpu) for ac in ("none", "full")))
    none, full = (each.flops for each in planned)
    real_none, real_full = (
        run_ranks(_count, 1, replace(ONE, ac=ac), tmp_path, log_folder=tmp_path / f"real-{ac}")[0]
        for ac in ("none", "full")
    )
    assert sum(none.values()) == real_none
    assert sum(full.values()) == real_full
    assert full[Category.RECOMPUTE] == real_full - real_none > 0
    assert none[Category.RECOMPUTE] == 0
    for category in (Category.FORWARD, Category.LOSS, Category.BACKWARD):
        assert full[category] == none[category] > 0


def _this_step_and_the_next(run: Run, folder: Path) -> list[StepTime | None]:
    with as_rank(run.world, 0):
        done = dry_run(planned_config(run, folder), run.world, machine="h100")
    times = [done.time]
    done.plan(None, "h100")
    return [*times, done.time]


def test_the_one_step_is_steady(tmp_path: Path):
    """Also where the first step of a run gathers a head that stays with its norm once less."""
    run = replace(EIGHT, reshard="never")
    ((first, second),) = run_ranks(_this_step_and_the_next, 1, run, tmp_path, log_folder=tmp_path)
    assert first is not None
    assert first == second


def test_the_codec_reads_and_writes_what_is_kept_in_float8(tmp_path: Path):
    ((time, float8, _, codec),) = _timed(tmp_path, (replace(ONE, ac="fp8"), {}))
    assert codec == 2 * float8 > 0  # once in forward, once in backward
    assert time.kernels["codec"] == pytest.approx(time.ms[Category.CODEC])
    aside = sum(time.kernels.values()) - time.step_ms  # one rank waits for nobody
    assert 0 < aside < time.kernels["copies"], "FSDP copies on streams of its own"
    classes = {"GEMM", "grouped GEMM", "attention", "elementwise", "copies", "codec"}
    assert set(time.kernels) == classes
    assert time.ms[Category.CODEC] > 0


def test_steps_of_accumulation_and_kinds_that_are_slower(tmp_path: Path):
    kernels = {"GEMM", "grouped GEMM", "attention", "elementwise", "copies", "codec"}
    measured = {
        "all_kernels": dict.fromkeys(kernels, 3.0),
        "my_card": {"GEMM": 2.0, "exchanges": 3.0},
    }
    files = {name: tmp_path / f"{name}.toml" for name in measured}
    for name, slower in measured.items():
        card = replace(MACHINES["h100"], name="h100", slower=slower)
        files[name].write_text("\n".join(machine_toml(card)))
    more = replace(EIGHT, global_batch=8 * 3, accumulate=3)
    slow_ones = [(EIGHT, {"machine": str(file)}) for file in files.values()]
    planned = _timed(tmp_path, (EIGHT, {}), (more, {}), *slow_ones)
    once, often, slower, slow = (each.time for each in planned)

    assert often.tokens == 3 * once.tokens
    for category in (Category.FORWARD, Category.LOSS, Category.RECOMPUTE):
        assert often.ms[category] == pytest.approx(3 * once.ms[category])
    assert often.ms[Category.OPTIMIZER] == pytest.approx(once.ms[Category.OPTIMIZER])
    for category in set(once.ms) - set(WAITS):
        assert slower.ms[category] == pytest.approx(3 * once.ms[category])
    assert slower.ms[Category.GATHERS] < once.ms[Category.GATHERS]  # more to hide behind

    messages = {"exchanges", "gathers", "reductions", "collectives"}
    assert messages < set(once.kernels) <= set(KINDS)
    for kind, ms in once.kernels.items():
        assert slow.kernels[kind] == pytest.approx(measured["my_card"].get(kind, 1.0) * ms), kind
    assert slow.ms[Category.EXCHANGES] > 2 * once.ms[Category.EXCHANGES]
    gemms = slow.kernels["GEMM"] - once.kernels["GEMM"]
    assert sum(slow.ms[p] - once.ms[p] for p in Category if p not in WAITS) == pytest.approx(gemms)
    assert slow.mfu is not None  # of an H100's peak
    assert slow.verdict().endswith("on my_card")
    kernels = (at for at in Category if at not in WAITS)
    assert all(slow.expected[at] == pytest.approx(slow.ms[at]) for at in kernels), "measured"


def test_a_pipeline_waits_for_its_other_stages(tmp_path: Path):
    run = Run(world=2, pp=2, parallelize="block", layers=2, global_batch=4)
    ((time, *_),) = _timed(tmp_path, (run, {}))
    busy = sum(
        ms
        for category, ms in time.ms.items()
        if category not in (Category.BUBBLE, Category.OPTIMIZER)
    )
    assert time.tokens == run.global_batch * run.seq_len / run.world
    # 1F1B, 4 microbatches, 2 stages: 1 in 4. A little of the waiting is clipping's.
    assert time.ms[Category.BUBBLE] == pytest.approx(busy / 4, rel=0.05)


GIB = 2**28  # of fp32 elements: a buffer of 1 GiB
GATHER_MS = collective_ms(MACHINES["h100"], 4 * GIB, world=16, per_node=8)[0]


def _on_a_clock(body: Callable[[torch.cpu.Stream, list], None]) -> dict[str, float]:
    """What a clock says of ``body``, which gets a side stream and a list that outlives it.

    Milliseconds by category, and by kind of kernel.
    """
    dist.init_process_group("fake", rank=0, world_size=16)
    live = LiveBytes([nn.Identity()], [])
    clock = StepClock([], live, MACHINES["h100"])
    kept: list[torch.Tensor] = []
    with FakeTensorMode(), live, clock:
        body(torch.cpu.Stream(), kept)
    once = clock.passes[0]
    return {category: once.ms[IDEAL].get(category, 0.0) for category in Category} | once.kernels


def _gather(stream: torch.cpu.Stream) -> torch.Tensor:
    with torch.cpu.stream(stream):
        full = torch.empty(GIB)
        dist.all_gather_single(full, torch.empty(GIB // 16))
    return full


def _read_at_once(stream: torch.cpu.Stream, kept: list) -> None:
    full = _gather(stream)
    a = torch.empty(4096, 4096)
    kept.append(a @ a)
    kept.append(full)
    full.sum()


def _gather_again(stream: torch.cpu.Stream, kept: list, *, reads: bool) -> None:
    """After a gather and a computation that is longer than two; the buffer is freed."""
    first = _gather(stream)
    a = torch.empty(65536, 65536)
    kept.append(a @ a)
    if reads:
        first.sum()
    del first
    kept.append(_gather(stream))
    kept[-1].sum()


def _reduce(stream: torch.cpu.Stream, kept: list, *, frees: bool) -> None:
    full = torch.ones(GIB)
    with torch.cpu.stream(stream):
        shard = torch.empty(GIB // 16)
        dist.reduce_scatter_single(shard, full)
    kept += [shard] if frees else [shard, full]


def _waits(body: Callable[..., None], tmp_path: Path, **arguments: Any) -> dict[str, float]:
    call = partial(body, **arguments)
    return run_ranks(_on_a_clock, 1, call, log_folder=tmp_path)[0]


def test_a_gather_runs_beside_the_computation_until_it_is_read(tmp_path: Path):
    times = _waits(_read_at_once, tmp_path)
    product_ms = 2 * 4096**3 / MACHINES["h100"].fp32 * 1e3
    read_ms = (4 * GIB + 4) / MACHINES["h100"].memory * 1e3
    assert times[Category.FORWARD] == pytest.approx(product_ms + read_ms)
    assert times[Category.COLLECTIVES] == pytest.approx(GATHER_MS - product_ms)
    assert times["collectives"] == pytest.approx(GATHER_MS)  # with the time on the link
    assert times[Category.GATHERS] == 0  # only what FSDP's own code gathers is called FSDP's


def _wait_for_a_gather(stream: torch.cpu.Stream, kept: list) -> None:
    group: Any = dist.group.WORLD
    ops = torch.ops._c10d_functional
    full = ops.all_gather_into_tensor(torch.empty(GIB // 16), 16, group.group_name)
    ops.wait_tensor(full)
    a = torch.empty(4096, 4096)
    kept += [a @ a, full]


def test_a_functional_gather_is_waited_for_where_the_program_does(tmp_path: Path):
    """What comes after runs later, if it reads something else."""
    assert _waits(_wait_for_a_gather, tmp_path)[Category.COLLECTIVES] == pytest.approx(GATHER_MS)


def _sum_over_all(stream: torch.cpu.Stream, kept: list) -> None:
    kept.append(torch.ones(GIB))
    dist.all_reduce(kept[0])


def test_an_all_reduce_takes_as_long_as_two_gathers(tmp_path: Path):
    assert _waits(_sum_over_all, tmp_path)[Category.COLLECTIVES] == pytest.approx(2 * GATHER_MS)


def test_a_buffer_is_not_gathered_into_before_it_has_been_read(tmp_path: Path):
    """Where the first gather's is read late, the second one can only start then."""
    late, at_once = (_waits(_gather_again, tmp_path, reads=reads) for reads in (True, False))
    assert late[Category.COLLECTIVES] == pytest.approx(GATHER_MS)
    assert at_once[Category.COLLECTIVES] == 0


def test_the_computation_waits_before_it_frees_what_is_being_reduced(tmp_path: Path):
    frees, keeps = (_waits(_reduce, tmp_path, frees=frees) for frees in (True, False))
    assert frees[Category.COLLECTIVES] == pytest.approx(GATHER_MS)
    assert keeps[Category.COLLECTIVES] == 0


def test_copies_to_and_from_the_host_run_beside_the_computation():
    """Until their source is freed, or their target read."""
    live, h100 = LiveBytes([nn.Identity()], []), MACHINES["h100"]
    copy_ms, product_ms = 4 * GIB / h100.host * 1e3, 2 * 4096**3 / h100.fp32 * 1e3
    for frees, comes_back, copies in ((False, False, 0), (True, False, 1), (True, True, 2)):
        clock = StepClock([], live, h100)
        with FakeTensorMode(), live, clock:
            on_host, source, a = torch.empty(GIB), torch.empty(GIB), torch.empty(4096, 4096)
            live.own([on_host], MemoryKind.OFFLOADED)
            on_host.copy_(source)
            a @ a  # reads another tensor, and does not wait
            if frees:
                del source
            if comes_back:
                back = torch.empty(GIB)
                back.copy_(on_host)
                a @ a
                back.sum()
        waited = clock.passes[0].ms[IDEAL][Category.OFFLOAD]
        assert waited == pytest.approx(copies * (copy_ms - product_ms))


def test_a_kernel_starts_when_the_host_has_launched_it():
    """An operation each, or a graph's launch and nodes; and none while code waits for counts."""
    h100 = replace(MACHINES["h100"], enqueue=1e-3)
    found = {}
    dist.init_process_group("fake", rank=0, world_size=16)
    for exchange in ("none", "all_gather_single", "all_to_all_single"):
        live, graphs = LiveBytes([nn.Identity()], []), How(graphs=True)
        clock = StepClock([], live, h100, others=[graphs])
        with FakeTensorMode(), live, clock:
            a, counts = torch.empty(8), torch.empty(16, dtype=torch.int64)
            if exchange != "none":
                long = torch.empty(16384, 16384)
                long @ long
                sent = counts[:1] if "gather" in exchange else torch.empty_like(counts)
                getattr(dist, exchange)(counts, sent)
            for _ in range(10):
                a = a + 1
        ms = clock.passes[0].ms
        found[exchange] = ms[EAGER][Category.HOST]
        if exchange == "none":
            one = ms[EAGER][Category.FORWARD] / 10
            assert found[exchange] == pytest.approx(10 * 1.0 - 9 * one)
            assert ms[graphs][Category.HOST] == pytest.approx(0.18 + 9 * max(0.007 - one, 0))
            assert ms[IDEAL][Category.HOST] == 0
    dist.destroy_process_group()
    assert found["all_gather_single"] == pytest.approx(1, rel=0.05), "of the product, first"
    assert found["all_to_all_single"] - 1 == pytest.approx(found["none"])


@pytest.mark.parametrize("phase", ["forward of layers.0", "backward of layers.0", "optimizer"])
def test_a_policy_costs_the_host_more_in_blocks_alone(phase: str):
    live, how = LiveBytes([nn.Identity()], []), How(policy=1.5)
    clock = StepClock([], live, replace(MACHINES["h100"], enqueue=1e-3), how)
    with FakeTensorMode(), live, clock:
        live.begin(phase)
        torch.empty(8) + 1
    cost = 1.0 if phase == "optimizer" else 1.5
    assert clock.passes[-1].ms[how][Category.HOST] == pytest.approx(cost)


@pytest.mark.parametrize(
    ("policy", "cost"),
    [
        (None, 1.0),
        (SelectiveAC.Config(), 1.0),
        (FP8AC.Config(preset="stock"), 1.03),
        (FP8AC.Config(preset="stock", op_policies={"*": "save_float8"}), 1.18),
        (FP8AC.Config(mode="full"), 1.06),
        (FP8AC.Config(mode="no_recompute"), 1.26),
    ],
)
def test_what_a_policy_costs_the_host_is_of_the_config(policy: Any, cost: float, tmp_path: Path):
    config = planned_config(Run(), tmp_path)
    config.activation_checkpoint = policy
    assert _how(config).policy == cost


def test_an_exchange_across_nodes_takes_the_network():
    """So a budget does not send again over the network what it can keep."""
    dist.init_process_group("fake", rank=0, world_size=16)
    h100, x = MACHINES["h100"], torch.empty(GIB, device="meta")
    op = torch.ops._c10d_functional.all_to_all_single.default
    groups: list[Any] = [dist.new_group(range(8)), dist.group.WORLD]
    in_node, across = (
        op_cost(op, (x, [], [], group.group_name), {}, x, h100).ms for group in groups
    )
    dist.destroy_process_group()
    assert in_node == pytest.approx(4 * GIB * 7 / 8 / h100.in_node_all_to_all * 1e3, rel=0.01)
    assert across == pytest.approx(4 * GIB / 2 / h100.network * 1e3, rel=0.01)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("forward", [0.3, 0.5])
def test_ranks_of_a_pipeline_are_idle_as_known(schedule: str, forward: float):
    assert idle_share(one_stage_actions(schedule, 4, 8), forward) == pytest.approx(3 / 8)
    assert idle_share(one_stage_actions(schedule, 1, 8), forward) == 0


def test_split_backwards_fill_a_pipeline():
    """Two stages, two microbatches; weights' gradients fill the second stage's idle time."""
    orders = {
        rank: [Action(word[0], rank, int(word[1])) for word in words.split()]
        for rank, words in enumerate(("F0 F1 B0 B1", "F0 I0 F1 I1 W0 W1"))
    }
    # Forward and both halves of backward take 1 each: both ranks are busy for 6, and end at 7.
    assert idle_share(orders, forward=1 / 3) == pytest.approx(1 / 6)
    assert idle_share(one_stage_actions("1F1B", 2, 2), forward=1 / 3) == pytest.approx(1 / 2)
    with pytest.raises(ValueError, match="wait for each other"):
        idle_share({0: [Action("B", 0, 0), Action("F", 0, 0)], 1: orders[1][:2]}, 0.5)
    with pytest.raises(ValueError, match="wait for each other"):
        idle_share({0: [Action("B", 0, 0)], 1: [Action("F", 1, 0), Action("B", 1, 0)]}, 0.5)


@pytest.mark.parametrize(
    ("name", "idle"),
    [("Interleaved1F1B", 3 / 16), ("ZBVZeroBubble", None), ("DualPipeV", None)],
)
def test_schedules_of_torch_have_the_actions(name: str, idle: float | None):
    """Two stages a rank, 4 ranks, 8 microbatches."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=8,
            group=None,
            group_size=4,
            group_rank=0,
            has_backward=True,
            device="cpu",
            is_first=index == 0,
            is_last=index == 7,
            stage_index_to_group_rank={},
            submod=nn.Identity(),
        )
        for index in ((0, 4) if name == "Interleaved1F1B" else (0, 7))
    ]
    schedule = get_schedule_class(name)(cast(Any, stages), n_microbatches=8, loss_fn=max)
    orders = actions_of(schedule)
    forwards = [(a.stage, a.microbatch) for o in orders.values() for a in o if a.kind == "F"]
    assert sorted(forwards) == [(stage, batch) for stage in range(8) for batch in range(8)]
    share = idle_share(orders, forward=1 / 3)
    assert share == pytest.approx(idle) if idle is not None else 0 < share < 3 / 8


def test_tokens_a_second_are_those_of_the_sum():
    first, second, last = (
        Pass(ms={IDEAL: {category: ms}, how: {category: 2 * ms, Category.HOST: ms}, other: {}})
        for how, other in [(How(), How(graphs=True))]
        for category, ms in (
            (Category.FORWARD, 6.0),
            (Category.FORWARD, 4.0),
            (Category.OPTIMIZER, 2.0),
        )
    )
    first.launched = last.launched = 10
    last.ms[How(graphs=True)] = {Category.OPTIMIZER: 23.0}
    time = StepTime.of(
        [first, second, last],
        How(),
        accumulation=3,
        idle=0.5,
        machine="h200",
        tokens=2300,
        flops_per_token=10**9,
        host_is_ahead_ms=9.0,
    )
    counted = {category: ms for category, ms in time.ms.items() if ms}
    assert counted == {Category.FORWARD: 14.0, Category.OPTIMIZER: 2.0, Category.BUBBLE: 7.0}
    assert time.step_ms == 23.0
    assert time.tokens_per_second == 100_000
    assert time.mfu == 1e14 / get_peak_flops("H200")
    assert time.verdict() == "expect 33,333 tokens/s a GPU (+-26%), 69.0 ms a step on h200"
    said = "0.06 of 0.07 s, 20 kernels: the card waits for it 23% of the time"
    assert time.host == f"{said}; training.disable_cuda_graphs = false is planned 0.33 of it"
    *parts, total, ideal = time.table()
    assert [float(line.split()[0]) for line in parts] == [28.0, 4.0, 16.0, 21.0]
    assert total.split() == ["69.0", "sum"]
    assert ideal.endswith("kernels: 100,000 tokens/s a GPU, MFU 10.1% of 989 TFLOP/s")
    assert replace(time, is_measured=True).verdict().startswith("expect 33,333 tokens/s a GPU, 69")
    for machine in MACHINES:
        assert replace(time, machine=machine).peak > MACHINES[machine].gemm  # Titan knows it
    assert replace(time, flops_per_token=None).mfu is None


def test_operations_in_place_read_and_write_what_they_do():
    x, y = torch.ones(1000), torch.ones(1000)
    ops, h100 = torch.ops.aten, MACHINES["h100"]
    for op, args, vectors in (
        (ops.add.Tensor, (x, y), 3),
        (ops.add_.Tensor, (x, y), 3),
        (ops.copy_.default, (x, y), 2),
        (ops.zero_.default, (x,), 1),
        (ops._foreach_add_.List, ([x, x], [y, y]), 6),
        (ops._foreach_copy_.default, ([x, x], [y, y]), 4),
    ):
        assert op_cost(op, args, {}, op(*args), h100).nbytes == 4000 * vectors, op
    adamw = ops._fused_adamw_.default
    options = dict.fromkeys(("lr", "beta1", "beta2", "weight_decay", "eps"), 0.1)
    args = ([x], [y], [x.clone()], [x.clone()], [], [torch.ones(())])
    kwargs = {**options, "amsgrad": False, "maximize": False}
    assert op_cost(adamw, args, kwargs, adamw(*args, **kwargs), h100).nbytes == 4 + 4000 * 8


@pytest.mark.parametrize(("rows", "share"), [(160, 1 / 2), (480, 3 / 4), (10**6, 1)])
def test_a_grouped_product_is_slower_where_an_expert_has_few_rows(rows: int, share: float):
    """Forward, and the gradient of the weights, which sums over the rows."""
    h100, grouped = MACHINES["h100"], torch.ops.aten._grouped_mm.default
    with FakeTensorMode():
        x, y = (torch.empty(4 * rows, 8192, dtype=torch.bfloat16) for _ in range(2))
        weight = torch.empty(4, 8192, 8192, dtype=torch.bfloat16)
        ends = torch.empty(4, dtype=torch.int32)
        for a, b in ((x, weight), (x.t(), y)):
            cost = op_cost(grouped, (a, b, ends), {}, None, h100)
            assert cost.flops == 2 * 4 * rows * 8192**2
            assert cost.flops / cost.ms * 1e3 == pytest.approx(share * h100.grouped, rel=1e-3)


def test_a_product_of_float8_is_faster_by_the_machines_factor():
    h100 = replace(MACHINES["h100"], float8=1.5)
    with FakeTensorMode():
        x, weight = (torch.empty(8192, 8192, dtype=torch.bfloat16) for _ in range(2))
        plain = op_cost(torch.ops.aten.mm.default, (x, weight.t()), {}, x, h100)
        x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        scales = torch.empty(8192, 1), torch.empty(1, 8192)
        args = (x8, weight8.t(), *scales)
        scaled = op_cost(torch.ops.aten._scaled_mm.default, args, {}, x, h100)
    assert scaled.flops == plain.flops
    assert plain.ms / scaled.ms == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("window", "computed"),
    # Of 8,192 tokens: all; twice 128 and a tile, since causal is half.
    [(0, 1), (128, 2 * 256 / 8192), (4096, 1), (8192, 1)],
)
def test_attention_takes_as_long_as_the_scores_that_it_computes(window: int, computed: float):
    attention = AttentionShapes(AttentionShapes.Config(window=window))
    times = []
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 16, 8192, 128, dtype=torch.bfloat16) for _ in range(3))
        for masked in (0.0, attention._share_masked(8192)):
            fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
            out = fused(q, k, v, None, masked, True)
            slow = replace(MACHINES["h100"], attention=1e12)  # not bound by its bytes
            times.append(op_cost(fused, (q, k, v, None, masked, True), {}, out, slow).ms)
    assert times[1] / times[0] == pytest.approx(computed)
    assert times[0] == pytest.approx(4 * 16 * 8192**2 * 128 / 2e12 * 1e3), "half of the products"
