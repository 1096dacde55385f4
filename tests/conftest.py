"""Fixtures. Their imports wait: the process that leads the workers of pytest-xdist needs none."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.toml_files import Loader
    from tests.helpers.training import Runs
    from titan_ext.run.trainer import Trainer


def pytest_configure() -> None:
    gc.disable()  # imports make it walk millions of objects, again and again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or Triton's bindings report what they leak


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

    monkeypatch.setattr(no_accelerator, "_get_available_device_type", lambda: "cuda")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, as working folder and on Python's path; its modules go with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    inside = f"{tmp_path}{os.sep}"
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(inside):
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
