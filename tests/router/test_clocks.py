"""A conversation's lifetime counts the time that has passed, even if the system clock is set."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from placement.engines import Role
from router.directory.api.messages import TurnEnded
from router.directory.directory import Directory, DirectorySettings
from router.process import SteadyClock
from tests.router.directory.test_restart import release
from tests.router.directory.test_table import ask, place
from tests.support.engines import info, placer, state


@dataclass
class MachineClocks:
    """System clock and monotonic clock of a machine, of which a jump moves only the system clock."""

    system: float = 1_800_000_000.0
    up: float = 500.0

    def passes(self, seconds: float) -> None:
        self.system += seconds
        self.up += seconds

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.up, lambda: self.system)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_steady_clock_ignores_that_the_system_clock_is_set(jump: float) -> None:
    machine = MachineClocks()
    clock = machine.clock()
    began = clock()
    machine.system += jump
    machine.passes(10)
    assert clock() == pytest.approx(began + 10)


def test_a_new_clock_follows_the_system_but_never_goes_behind_the_stored_time() -> None:
    machine = MachineClocks()
    clock = machine.clock()
    clock.not_before(machine.system - 60)
    assert clock() == machine.system
    clock.not_before(machine.system + 60)
    assert clock() == machine.system + 60


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_conversation_lives_for_its_lifetime_despite_clock_jumps(tmp_path: Path, jump: float) -> None:
    """The system clock jumps while the directory runs, and the directory restarts in between."""
    machine = MachineClocks()

    async def directory() -> Directory:
        settings, journal = DirectorySettings(600.0), tmp_path / "journal"
        made = Directory(settings, placer(), journal, release, machine.clock())
        made.replay()
        return made

    first = await directory()
    for engine in (info("p0", Role.PREFILL), info("d0")):
        first.engine_up(engine)
        first.engine_state(state(engine.engine, 1))
    place(first.table, ask("c"), first.clock())
    first.table.turn_ended("c", "g", first.clock(), TurnEnded(prompt_tokens=10, completion_tokens=1))
    first.changed()
    await first.durable()
    await first.close()
    first = await directory()
    for passed, lives in ((300.0, True), (310.0, False)):
        machine.system += jump
        machine.passes(passed)
        first.table.expire(first.clock())
        assert (first.table.conversations.get("c") is not None) is lives
    await first.close()


async def test_a_restarted_directorys_clock_does_not_go_back_with_the_system_clock(tmp_path: Path) -> None:
    machine = MachineClocks()
    settings = DirectorySettings(600.0)
    first = Directory(settings, placer(), tmp_path / "journal", release, machine.clock())
    first.engine_up(info("d0"))
    first.engine_state(state("d0", 1))
    place(first.table, ask("c"), first.clock())
    first.changed()
    await first.durable()
    used_at = first.clock()
    await first.close()
    machine.system -= 3600
    second = Directory(settings, placer(), tmp_path / "journal", release, machine.clock())
    second.replay()
    assert second.clock() == used_at
    await second.close()
