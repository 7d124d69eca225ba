"""Engine reports are cumulative, so lost and repeated reports do not matter."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from placement.engines import EngineInfo, EngineState
from router.directory.api.messages import TurnEnded
from router.directory.directory import Directory, DirectorySettings
from router.directory.table import BindingTable
from tests.router.directory.test_table import ask, place, table
from tests.support.engines import info, placer, state
from tests.support.waiting import until


def report(seq: int, live: int = 0, named_after: int = 0, **confirmed: int) -> EngineState:
    return replace(state("d0", seq, live), confirmed=confirmed, named_after=named_after)


def reserved(made: BindingTable, live: int = 0) -> int:
    return made.kv_in_use("d0") - live


def test_the_newest_report_of_an_engine_replaces_all_missed_ones() -> None:
    made = table(decoders=1)
    for key in ("a", "b", "c"):
        place(made, ask(key, 1000))
    assert reserved(made) == 3 * 1100
    assert made.engine_state(report(1), 0.0)
    assert made.engine_state(report(9, live=2000, a=3, b=7), 1.0)
    assert reserved(made, 2000) == 1100


def test_a_report_of_an_earlier_turn_keeps_the_reservation_of_a_later_one() -> None:
    made = table(decoders=1)
    place(made, ask("c", 1000))
    made.engine_state(report(2, live=1000, c=2), 0.0)
    made.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=1000, completion_tokens=5))
    place(made, ask("c", 9400, uncached_tokens=9000))
    made.engine_state(report(3, live=1000, c=2), 2.0)
    assert reserved(made, 1000) == 9100
    made.engine_state(report(4, live=9000, c=4), 3.0)
    assert reserved(made, 9000) == 0


def test_a_repeated_or_late_engine_report_changes_nothing() -> None:
    made = table(decoders=1)
    place(made, ask("c", 1000))
    assert made.engine_state(report(5, live=70), 0.0)
    for late in (report(5, live=1, c=5), report(4, live=1, c=4)):
        assert not made.engine_state(late, 1.0)
    assert reserved(made, 70) == 1100


def test_a_reservation_ends_if_the_reports_that_confirm_it_were_missed() -> None:
    made = table(decoders=1)
    place(made, ask("c", 1000))
    made.engine_state(report(5), 0.0)
    made.engine_state(report(900, live=1000, named_after=700, other=750), 60.0)
    assert reserved(made, 1000) == 0


def test_the_first_report_to_a_restarted_directory_ends_no_reservation() -> None:
    """The directory has just restarted, so that all of its reservations are recent."""
    made = table(decoders=1)
    place(made, ask("a", 1000))
    place(made, ask("b", 1000))
    made.engine_state(report(900, live=1000, named_after=700, b=899), 1.0)
    assert reserved(made, 1000) == 1100


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 2**32))
def test_reservations_after_the_last_report_do_not_depend_on_lost_reports(
    passed: list[bool], seed: int
) -> None:
    """One directory gets every report, another only some and the last; both have the same KV in use."""
    every, some = table(decoders=1), table(decoders=1)
    named: dict[str, int] = {}
    for seq, heard in enumerate([*passed, True], start=1):
        for made in (every, some):
            place(made, ask(f"c{seq}", 10))
        if (seed >> (seq % 32)) & 1:
            named[f"c{max(1, seq - 1)}"] = seq
        told = report(seq, live=seq, **named)
        every.engine_state(told, float(seq))
        if heard:
            some.engine_state(told, float(seq))
    assert every.kv_in_use("d0") == some.kv_in_use("d0")


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[Directory]:
    async def release(engine: EngineInfo, key: str) -> None:
        pass

    made = Directory(DirectorySettings(100.0), placer(), tmp_path / "journal", release)
    made.replay()
    made.engine_up(info("d0"))
    yield made
    await made.close()


async def test_a_report_that_repeats_an_earlier_parking_does_not_park_the_conversation(
    directory: Directory,
) -> None:
    place(directory.table, ask("c", turn=1))
    directory.table.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=10, completion_tokens=1), turn=1)
    directory.engine_state(replace(report(1), parked={"c": 1}))
    assert directory.table.conversations.parked == 1
    place(directory.table, ask("c", turn=2))
    directory.table.turn_ended("c", "g", 2.0, TurnEnded(prompt_tokens=20, completion_tokens=1), turn=2)
    directory.engine_state(replace(report(2), parked={"c": 1}))
    assert directory.table.conversations.parked == 0
    directory.engine_state(replace(report(3), parked={"c": 3}))
    assert directory.table.conversations.parked == 1


async def test_a_conversation_evicted_from_a_full_host_is_no_longer_parked(directory: Directory) -> None:
    place(directory.table, ask("c", turn=1))
    directory.table.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=10, completion_tokens=1), turn=1)
    directory.engine_state(replace(report(1), parked={"c": 1}))
    directory.engine_state(replace(report(2), unparked={"c": 2}))
    assert directory.table.conversations.parked == 0
    directory.engine_state(replace(report(3), parked={"c": 3}, unparked={"c": 2}))
    assert directory.table.conversations.parked == 1


async def test_a_conversation_evicted_before_its_turn_ended_is_not_parked(directory: Directory) -> None:
    place(directory.table, ask("c", turn=1))
    directory.engine_state(replace(report(1), parked={"c": 1}))
    directory.engine_state(replace(report(2), unparked={"c": 2}))
    directory.table.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=10, completion_tokens=1), turn=1)
    assert directory.table.conversations.parked == 0


async def test_a_gateways_report_that_arrives_twice_is_applied_once(directory: Directory) -> None:
    assert directory.activities_seen("g", 0, 2) == 0
    assert directory.activities_seen("g", 0, 3) == 2  # sent again, with one more
    assert directory.activities_seen("g", 3, 1) == 0
    assert directory.activities_seen("g", 0, 2) == 2
    assert directory.activities_seen("other", 0, 1) == 0


async def test_the_turns_of_a_gateway_end_if_it_never_opens_its_stream(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway asks a directory that has just restarted, and crashes before it opens its stream."""
    monkeypatch.setattr("router.directory.directory.STREAMLESS_S", 0.05)
    directory.heard_from("g")
    place(directory.table, ask("c", turn=1))
    assert directory.table.running_at("c")
    await until(lambda: not directory.table.running_at("c"))


async def test_a_gateways_report_repeated_after_a_long_silence_is_applied_once(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a gateway is cut off, the answer to its report may be lost. It repeats the report afterwards."""
    monkeypatch.setattr("router.directory.directory.STREAMLESS_S", 0.05)
    assert directory.activities_seen("g", 0, 2) == 0
    place(directory.table, ask("c", turn=1))
    await until(lambda: not directory.table.running_at("c"))  # the gateway counts as gone
    assert directory.activities_seen("g", 0, 2) == 2


def releases_failed() -> float:
    return REGISTRY.get_sample_value("conserve_releases_failed_total") or 0.0


async def test_an_engine_that_missed_the_end_of_a_conversation_is_told_after_its_next_report(
    tmp_path: Path,
) -> None:
    released: list[str] = []
    reachable = False

    async def release(engine: EngineInfo, key: str) -> None:
        if not reachable:
            raise ConnectionError("the cable is pulled")
        released.append(key)

    made = Directory(DirectorySettings(100.0), placer(), tmp_path / "journal", release)
    made.replay()
    made.engine_up(info("d0"))
    before = releases_failed()
    place(made.table, ask("c"))
    made.table.end("c", "deleted", 1.0)
    made.changed()
    await until(lambda: releases_failed() == before + 1)
    reachable = True
    made.engine_state(report(1, live=100))
    made.changed()
    await until(lambda: released == ["c"])
    await made.close()
