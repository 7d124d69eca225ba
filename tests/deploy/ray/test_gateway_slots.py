"""A new gateway takes the free one of two slots and replaces the old gateway, even if it is interrupted."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.ray.gateway_actor import place_of
from workers.keeper.launch import ProcessCommand
from workers.keeper.process_lease import LeasedProcess
from workers.oom_score import OomScore

SLEEP = ProcessCommand((sys.executable, "-c", "import time; time.sleep(600)"), dict(os.environ))


class Slots:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[LeasedProcess] = []

    def start(self, slot: str, config: str) -> LeasedProcess:
        process = LeasedProcess.start(
            self.folder / slot,
            SLEEP,
            fingerprint=config,
            epoch=0,
            ports=(1,),
            lease_s=30.0,
            grace_s=0.2,
            oom_score=OomScore.SERVING,
        )
        self.started.append(process)
        return process

    def place(self, config: str) -> tuple[str, str | None]:
        slot, old = place_of(self.folder, "gateway-0", config)
        return slot.name, old.directory.name if old is not None else None


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    made = Slots(tmp_path)
    yield made
    for process in made.started:
        process.end(1.0)


def test_the_first_gateway_runs_in_the_first_slot(slots: Slots) -> None:
    assert slots.place("a") == ("gateway-0", None)


def test_a_running_gateway_with_the_wanted_configuration_is_kept(slots: Slots) -> None:
    slots.start("gateway-0-b", "a")
    assert slots.place("a") == ("gateway-0-b", None)


def test_a_gateway_with_another_configuration_is_replaced_by_one_in_the_other_slot(slots: Slots) -> None:
    slots.start("gateway-0", "a")
    assert slots.place("b") == ("gateway-0-b", "gateway-0")


def test_an_interrupted_hand_over_between_gateways_continues(slots: Slots) -> None:
    """An old gateway that nobody ends would keep accepting connections."""
    slots.start("gateway-0", "a")
    slots.start("gateway-0-b", "b")
    assert slots.place("b") == ("gateway-0-b", "gateway-0")


def test_a_draining_gateway_is_left_alone(slots: Slots) -> None:
    old = slots.start("gateway-0", "a")
    slots.start("gateway-0-b", "b")
    old.expire()
    assert slots.place("b")[1] is None
