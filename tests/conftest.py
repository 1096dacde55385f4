from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.matrix.check import References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("stock"))


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
