from pathlib import Path

import pytest

from tests.matrix.check import References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("stock"))


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    return tmp_path / "logs"
