"""What ends in time ends by the time that passed, whatever the system's clock is set to."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from placement.engines import Role
from router.directory.directory import Directory, DirectorySettings
from router.directory.journal import Journal
from router.process import SteadyClock, Zero
from tests.router.directory.test_restart import release
from tests.router.directory.test_table import ask, place
from tests.support.engines import info, placer, state


@dataclass
class MachineClocks:
    """Its clocks; a jump moves one of them."""

    system: float = 1_800_000_000.0
    up: float = 500.0
    boot: str = "first"

    def passes(self, seconds: float) -> None:
        self.system += seconds
        self.up += seconds

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.boot, lambda: self.up, lambda: self.system)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_jump_moves_nothing_nor_does_it_for_who_opens_the_store_next(jump: float) -> None:
    machine = MachineClocks()
    clock = machine.clock()
    began, kept = clock(), clock.resume(None)
    machine.system += jump
    machine.passes(10)
    assert clock() == pytest.approx(began + 10)
    after = machine.clock()
    assert after.resume(kept) == kept
    assert after() == pytest.approx(began + 10)


def test_after_a_boot_it_goes_by_the_system_but_never_back() -> None:
    machine = MachineClocks()
    kept = machine.clock().resume(None)
    machine.boot, machine.up, machine.system = "second", 5.0, machine.system + 100
    clock = machine.clock()
    assert clock.resume(kept).boot == "second"
    assert clock() == machine.system
    clock.resume(Zero("first", 1.0), newest=machine.system + 60)
    assert clock() == machine.system + 60


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_conversation_lives_as_long_as_it_should(tmp_path: Path, jump: float) -> None:
    """Over a jump while the directory runs, and over one while it is down."""
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
    first.table.turn_ended("c", "g", first.clock(), prompt_tokens=10, completion_tokens=1)
    first.changed()
    for passed, lives in ((300.0, True), (310.0, False)):
        machine.system += jump
        machine.passes(passed)
        first.table.expire(first.clock())
        assert (first.table.conversations.get("c") is not None) is lives
        if lives:
            await first.durable()
            await first.close()
            machine.system += jump
            first = await directory()
    await first.close()


async def test_the_zero_is_kept_with_the_times(tmp_path: Path) -> None:
    machine = MachineClocks()
    for _ in range(2):
        journal = Journal(tmp_path / "journal")
        clock = machine.clock()
        journal.resume(clock)
        assert clock.zero.at == pytest.approx(1_800_000_000.0 - 500.0)
        assert journal.read() == []
        await journal.close()
        machine.system += 5000
