from pathlib import Path

import pytest

from tests.workers.power.machine import GpuMachine, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> GpuMachine:
    return GpuMachine.of(library, tmp_path)
