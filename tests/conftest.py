"""Fixtures. Their imports wait: the process that leads the workers of pytest-xdist needs none."""

import gc
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.helpers.toml_files import Loader
    from tests.helpers.training import Runs
    from titan_ext.run.trainer import Trainer


CPU_S = pytest.StashKey[float]()
"""CPU seconds of a session, and of all processes that it started."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # imports make it walk millions of objects, again and again
    config.stash[CPU_S] = 0.0


def pytest_report_header() -> str:
    names = ("torch", "torchtitan", "torchao")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that took more than SUITE_CPU_S CPU seconds, so that the suite stays quick."""
    gc.unfreeze()  # or Triton's bindings report what they leak
    config: Any = session.config
    # Of workers that have told theirs, some are still there.
    config.stash[CPU_S] += sum(os.times()[:2]) if config.stash[CPU_S] else _cpu_s()
    if hasattr(config, "workeroutput"):
        config.workeroutput["cpu_s"] = config.stash[CPU_S]
    elif config.stash[CPU_S] > float(os.environ.get("SUITE_CPU_S", "inf")):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[CPU_S] += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    limit = os.environ.get("SUITE_CPU_S", "")
    said = f"; no more than {limit} are allowed (SUITE_CPU_S)" if limit else ""
    terminalreporter.write_line(f"{config.stash[CPU_S]:.0f} CPU s{said}")


def _cpu_s() -> float:
    """Of this process and its descendants, those that have ended too: ranks are grandchildren."""
    ticks, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="session", autouse=True)
def _quick_matmul() -> None:
    from titan_ext.base.no_accelerator import fast_bfloat16_matmul

    fast_bfloat16_matmul()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    """Of the whole session: the workers of pytest-xdist have a folder each in a common one."""
    from tests.helpers.training import Runs

    folder = tmp_path_factory.getbasetemp()
    return Runs((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "runs")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has one, as far as titan_ext can tell."""
    from titan_ext.base import no_accelerator
    from titan_ext.run import trainer

    monkeypatch.setattr(no_accelerator, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(trainer, "_checked", set())  # what is checked here is not what is later


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, as working folder and on Python's path; its modules go with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)  # a look at each of thousands takes longer than most tests
    yield tmp_path
    inside = f"{tmp_path}{os.sep}"
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(inside):
            del sys.modules[name]


@pytest.fixture
def config(folder: Path) -> "Loader":
    """Loads a text as run.toml, beside other files."""
    from titan_ext.config_registry.resolve import load

    def load_text(text: str, **files: str) -> "Trainer.Config":
        (folder / "run.toml").write_text(text)
        for name, other in files.items():
            (folder / f"{name}.toml").write_text(other)
        return load("run.toml")

    return load_text


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
