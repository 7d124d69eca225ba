"""What many tests share: one real fleet a session, and the recorded life of another."""

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

# A shell that starts pytest in the background has it ignore Ctrl-C, and so would all the processes that tests
# start and end by it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Linux tells the boot time in whole seconds, and on some machines now one, now the next: psutil, which asks
# each time, then takes a child for older than its parent and leaves it out.
if psutil.LINUX:
    mock.patch("psutil._pslinux.boot_time", return_value=psutil.boot_time()).start()

settings.register_profile("busy machine", deadline=None, max_examples=60)
settings.load_profile("busy machine")


MARKS_OF_ALL = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What a suite leaves out whole is not imported for it either: that takes longer than most tests."""
    left_out = {mark for mark in ("engine", "fleet", "slow") if f"not {mark}" in str(config.option.markexpr)}
    if not left_out or collection_path.suffix != ".py":
        return None
    marks = MARKS_OF_ALL.search(collection_path.read_text())
    return True if marks and left_out & set(re.findall(r"mark\.(\w+)", marks[1])) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The shared fleet is up only while tests use it, and those that need it unused come first."""

    def place(item: pytest.Item) -> int:
        used = getattr(item, "fixturenames", ())
        return ("laptop_fleet" in used) * (1 if "unused_fleet" in used else 2)

    items.sort(key=place)


@pytest.fixture(scope="module", autouse=True)
def kept_environment() -> Iterator[None]:
    """What a module's tests and fixtures set in the environment, or vLLM does in this process (its CPU
    platform has engines spawned), is not for the engines that later modules start."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def laptop_fleet() -> Iterator[RunningFleet]:
    """configs/random.yaml, up: Ray, one prefiller, two decoders, directory, gateway. A minute or more.

    A prefiller's queue may be long: twenty prompts take their time on a busy machine.
    """
    with fleet_up("random", lambda content: content["conversation"].update(prefiller_wait="2m")) as fleet:
        yield fleet


@pytest.fixture
def unused_fleet(laptop_fleet: RunningFleet) -> RunningFleet:
    """The same, before anybody else talks on it: no KV is in use that a test would have to wait for."""
    return laptop_fleet


@pytest.fixture(scope="session")
def life(tmp_path_factory: pytest.TempPathFactory) -> WholeLife:
    """What was seen of a co-serving fleet on a machine with GPUs that are not there. A minute and a half."""
    return whole_life(tmp_path_factory.mktemp("life"))
