"""The fleet on which the tests of clients run."""

from collections.abc import Iterator

import pytest

from tests.support.agent_fleet import PROGRAMS, agent_fleet
from tests.support.fleet import RunningFleet


@pytest.fixture(scope="session")
def laptop_fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningFleet]:
    """Start one fleet for all clients: the coding agents' under `make clients`, else the usual one."""
    if PROGRAMS:
        with agent_fleet(tmp_path_factory.mktemp("agents") / "model") as fleet:
            yield fleet
    else:
        yield request.getfixturevalue("laptop_fleet")
