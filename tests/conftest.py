"""Fixtures that many tests share: the laptop fleet, and the record of a second fleet from start to end."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import settings

from tests.support.fleet import RunningFleet, fleet_up
from tests.support.whole_life import WholeLife, whole_life

# A shell that starts pytest in the background makes it ignore SIGINT. The processes that tests start would
# inherit that, and tests end some of them with SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Linux reports the boot time in whole seconds, and on some machines the second varies between reads. psutil
# reads it each time, may then take a child for older than its parent, and leaves the child out.
if psutil.LINUX:
    mock.patch("psutil._pslinux.boot_time", return_value=psutil.boot_time()).start()

settings.register_profile("busy machine", deadline=None, max_examples=60)
settings.load_profile("busy machine")


TESTS = Path(__file__).parent
MODULE_MARKS = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without tests of this suite, because imports take longer than most tests."""
    words = re.findall(r"(not )?\b(engine|fleet|slow)\b", str(config.option.markexpr))
    if not words or collection_path.suffix != ".py":
        return None
    excluded, wanted = ({mark for no, mark in words if bool(no) is left_out} for left_out in (True, False))
    content = collection_path.read_text()
    module = MODULE_MARKS.search(content)
    if module and excluded & _marks_in(module[1]):
        return True
    above = (folder / "conftest.py" for folder in collection_path.parents[: -len(TESTS.parents)])
    written = [content, *(file.read_text() for file in above if file.exists())]  # a fixture's marks, too
    return True if wanted and not wanted & _marks_in("\n".join(written)) else None


def _marks_in(content: str) -> set[str]:
    return set(re.findall(r"mark\.(\w+)", content))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the shared fleet last, so that it is up only for them; `unused_fleet` tests first."""

    def position(item: pytest.Item) -> int:
        used = getattr(item, "fixturenames", ())
        return ("laptop_fleet" in used) * (1 if "unused_fleet" in used else 2)

    items.sort(key=position)


@pytest.fixture(scope="module", autouse=True)
def restored_environment() -> Iterator[None]:
    """Restore the environment after each module, so that later modules start engines with a clean one.

    Tests and fixtures set variables, and so does vLLM in this process: its CPU platform has engines spawned.
    """
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def laptop_fleet() -> Iterator[RunningFleet]:
    """Start configs/random.yaml: Ray, one prefiller, two decoders, directory, gateway. Takes a minute or
    more.

    The prefiller's queue may be long: twenty prompts take a while on a busy machine.
    """
    with fleet_up("random", lambda content: content["conversation"].update(prefiller_wait="2m")) as fleet:
        yield fleet


@pytest.fixture
def unused_fleet(laptop_fleet: RunningFleet) -> RunningFleet:
    """Return the laptop fleet. Tests with this fixture run before its other tests, while its KV is free."""
    return laptop_fleet


@pytest.fixture(scope="session")
def life(tmp_path_factory: pytest.TempPathFactory) -> WholeLife:
    """Record of a co-serving fleet's whole life on simulated GPUs. Takes a minute and a half."""
    return whole_life(tmp_path_factory.mktemp("life"))
