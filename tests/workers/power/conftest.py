from pathlib import Path

import pytest

from tests.workers.power.machine import Machine, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> Machine:
    return Machine.of(library, tmp_path)
