"""A restarted directory places no new conversation before all of its engines have reported."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

from placement.engines import EngineInfo, Role
from placement.routing.receipts import Refusal, RefusalReason
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import PLACE, Ask, Asks, Placed, TurnEnded
from router.directory.api.rpc import BROKEN, Stub
from router.directory.directory import DirectorySettings
from router.directory.journal import MAX_UNWRITTEN, JournalError
from router.directory.server import DirectoryServer
from router.directory.table import BindingTable
from router.directory.waiting import Waiter
from router.errors import DirectoryUnavailable
from tests.router.directory.test_journal import full_disk
from tests.router.directory.test_table import ask, nobody, place, table
from tests.support.engines import info, placer, state
from tests.support.waiting import until

Outcome = Placed | Refusal


def restarted(before: BindingTable) -> BindingTable:
    after = BindingTable(100.0, placer())
    after.replay(before.effects().rows)
    return after


def wait(made: BindingTable, asked: Ask, now: float = 0.0) -> list[Outcome]:
    got: list[Outcome] = []
    assert isinstance(made.place(asked, now, got.append), Waiter)
    return got


def test_new_conversations_go_to_the_least_loaded_decoder_once_all_engines_report() -> None:
    after = restarted(table())
    got = wait(after, ask("new", wait_s=30.0))
    for report in (state("d0", 7, live=5000), state("p0", 3)):
        assert after.engine_state(report, 1.0)
        after.serve_waiting(1.0)
        assert got == []
    assert after.engine_state(state("d1", 5, live=200), 2.0)
    after.serve_waiting(2.0)
    assert isinstance(got[0], Placed)
    assert (got[0].engine, got[0].prefiller) == ("d1", "p0")


def test_no_turn_is_placed_on_an_announced_engine_before_its_report() -> None:
    """A restarted keeper announces its engine before it receives the engine's state."""
    after = restarted(table(decoders=1))
    for engine in (info("p0", Role.PREFILL), info("d0")):
        assert not after.engine_up(engine)
    got = wait(after, ask("new", wait_s=30.0))
    after.engine_state(state("p0", 3), 1.0)
    after.engine_state(state("d0", 3), 1.0)
    after.serve_waiting(1.0)
    assert isinstance(got[0], Placed)


def test_a_prompt_too_large_for_engines_that_have_reported_waits_for_the_rest() -> None:
    before = table(decoders=1)
    before.engine_up(info("large", kv_tokens=100_000))
    after = restarted(before)
    after.engine_state(state("d0", 1), 0.0)
    got = wait(after, ask("huge", 50_000, wait_s=30.0))
    after.engine_state(state("p0", 1), 0.0)
    after.engine_state(state("large", 1), 0.0)
    after.serve_waiting(1.0)
    assert isinstance(got[0], Placed)


def test_a_bound_conversation_is_placed_before_all_engines_have_reported() -> None:
    before = table()
    bound = place(before, ask("c"))
    after = restarted(before)
    again = place(after, ask("c"))
    assert (again.engine, again.epoch, again.known) == (bound.engine, bound.epoch, True)


def test_the_lifetime_that_a_client_set_survives_a_restart() -> None:
    before = table()
    place(before, ask("c"))
    before.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=5, completion_tokens=5, ttl_s=30.0))
    after = restarted(before)
    assert (after.expire(30.9), after.expire(31.1)) == (0, 1)


def test_placing_does_not_wait_for_engines_that_are_lost_or_unreachable() -> None:
    before = table(decoders=3)
    bound = place(before, ask("c"))
    before.engine_down("d2")
    after = restarted(before)
    assert after.fleet.recalled == ("d0", "d1", "p0")
    after.engine_down("d1")
    after.engine_state(state("p0", 1), 0.0)
    assert bound.engine == "d0"
    got = wait(after, ask("c", lost=("d0", 1), wait_s=30.0))  # the gateway could not reach d0
    assert not after.fleet.awaits_some
    after.engine_up(info("d0", epoch=2))
    after.serve_waiting(1.0)
    assert isinstance(got[0], Placed)
    assert got[0].epoch == 2


def test_a_turn_waits_for_engines_to_report_for_at_most_its_own_limit() -> None:
    after = restarted(table())
    got = wait(after, ask("new", wait_s=5.0))
    after.serve_waiting(5.0)
    assert isinstance(got[0], Refusal)
    assert (got[0].reason, got[0].retry_after_s) == (RefusalReason.NO_DECODER, 1.0)
    assert "since a restart" in got[0].message


def test_a_new_keeper_of_a_known_engine_changes_only_its_address() -> None:
    made = table()
    place(made, ask("c", 3000))
    made.engine_state(state("d0", 1, live=6000, confirmed=("c",)), 0.0)
    moved = EngineInfo("d0", "decode", Role.DECODE, 1, "127.0.0.1:1", "", "127.0.0.1:9", 10_000, 16, 32_768)
    assert not made.engine_up(moved)
    assert made.fleet.info("d0") == moved
    assert made.kv_in_use("d0") == 6000
    assert place(made, ask("new")).engine == "d1"


async def release(engine: EngineInfo, key: str) -> None:
    pass


@asynccontextmanager
async def directory(folder: Path, **changes: float) -> AsyncIterator[tuple[DirectoryServer, str]]:
    settings = DirectorySettings(3600.0, **changes)  # type: ignore[arg-type]
    made = DirectoryServer(settings, placer(), folder / "journal", release, secret="s3cret")
    address = f"127.0.0.1:{await made.start('127.0.0.1', 0)}"
    try:
        yield made, address
    finally:
        await made.stop(0.1)


def fallbacks() -> float:
    return REGISTRY.get_sample_value("conserve_fallbacks_total", {"kind": "engines_missing"}) or 0.0


async def test_a_directory_waits_for_engines_of_its_journal_for_a_bounded_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with directory(tmp_path) as (first, _):
        for engine in (info("p0", Role.PREFILL), info("d0"), info("d1")):
            first.engine_up(engine)
    before = fallbacks()
    async with directory(tmp_path, return_s=0.3) as (second, _):
        assert REGISTRY.get_sample_value("conserve_engines_awaited") == 3.0
        second.engine_state(state("d1", 1, live=4000))
        got: list[Outcome] = []
        second.table.place(ask("new", wait_s=30.0), second.clock(), got.append)
        await until(lambda: got)
        assert isinstance(got[0], Placed)
        assert (got[0].engine, got[0].prefiller) == ("d1", None)
        assert fallbacks() == before + 1
        assert "placing without engines that were up before the restart engines=d0,p0" in caplog.text
        second.engine_state(state("d0", 1))  # a late report still counts
        assert place(second.table, ask("later")).engine == "d0"


async def test_a_burst_is_spread_over_decoders_as_if_the_directory_had_not_restarted(tmp_path: Path) -> None:
    """Engines report late, one by one, while conversations arrive."""
    engines = (info("d1"), info("p0", Role.PREFILL), info("d0"))
    async with directory(tmp_path) as (first, _):
        for engine in engines:
            first.engine_up(engine)
    async with directory(tmp_path, return_s=600.0) as (second, address):
        client = DirectoryClient(address, "g", secret="s3cret")
        await client.start()
        try:
            asks = [Ask(f"s:{n}", "", 1000, 600.0, turn=client.next_turn()) for n in range(4)]
            placing = [asyncio.create_task(client.place(one)) for one in asks]
            await until(lambda: second.table.waiting == 4)
            for engine in engines:
                assert not any(one.done() for one in placing)
                second.engine_up(engine)
                second.engine_state(state(engine.engine, 1))
                await asyncio.sleep(0.1)  # long enough for placements that should wait to be made
            outcomes = [outcome for outcome, _ in await asyncio.gather(*placing)]
        finally:
            await client.stop()
    assert all(isinstance(one, Placed) and one.prefiller == "p0" for one in outcomes)
    assert sorted(one.engine for one in outcomes if isinstance(one, Placed)) == ["d0", "d0", "d1", "d1"]


async def test_gateways_that_connect_to_a_restarted_directory_know_its_engines(tmp_path: Path) -> None:
    async with directory(tmp_path) as (first, address):
        old = DirectoryClient(address, "old", secret="s3cret")
        await old.start()
        first.engine_up(info("d0"))
        first.engine_state(state("d0", 5, live=3000))
        await until(lambda: old.engines.state("d0") and old.engines.load("d0").state.seq)
        port = int(address.rsplit(":", 1)[1])
    settings = DirectorySettings(3600.0)
    second = DirectoryServer(settings, placer(), tmp_path / "journal", release, secret="s3cret")
    await second.start("127.0.0.1", port)
    new = DirectoryClient(address, "new", secret="s3cret")
    await new.start()
    try:
        await until(lambda: len(second.gateways) == 2 and old.connected and new.connected)
        await until(lambda: len(new.engines))
        assert [one.engine for one in old.engines.usable()] == ["d0"]
        assert old.engines.load("d0").state.live_tokens == 3000
        assert new.engines.alive("d0", 1)  # turns of conversations that are bound there
        assert new.engines.usable() == []  # but no keeper has announced it
        second.engine_state(state("d0", 6, live=3100))
        await until(lambda: new.engines.usable() and old.engines.load("d0").state.live_tokens == 3100)
        second.engine_down("d0")
        await until(lambda: not len(new.engines) and not len(old.engines))
    finally:
        await old.stop()
        await new.stop()
        await second.stop(0.1)


def test_a_turn_that_does_not_wait_for_engines_is_refused_with_a_retry_time() -> None:
    outcome = restarted(table()).place(ask("new"), 0.0, nobody)
    assert isinstance(outcome, Refusal)
    assert outcome.retry_after_s == 1.0


async def test_no_turn_is_placed_while_the_disk_and_the_queue_of_rows_are_full(tmp_path: Path) -> None:
    async with directory(tmp_path) as (made, address), grpc.aio.insecure_channel(address) as channel:
        made.engine_up(info("d0"))
        await made.durable()
        with full_disk(tmp_path / "journal"):
            for epoch in range(2, MAX_UNWRITTEN + 3):
                made.table.engine_up(info("d0", epoch=epoch))
            made.changed()
            with pytest.raises(JournalError, match="free space"):
                await made.durable()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(Stub(channel, "s3cret").stream(PLACE, Asks((ask("new"),)), 30.0))
        assert refused.value.code() is BROKEN
        assert "free space or fix the disk" in str(refused.value.details())
        assert made.table.describe("new") is None  # nor was anything placed and then undone


async def test_a_gateway_that_knows_a_newer_directory_is_refused_by_an_older_one(
    tmp_path: Path,
) -> None:
    async def started(name: str, port: int, ahead_s: float) -> tuple[DirectoryServer, int]:
        journal = (
            tmp_path / name / "journal"
        )  # on separate disks, so that no lock keeps the directories apart
        server = DirectoryServer(
            DirectorySettings(3600.0),
            placer(),
            journal,
            release,
            secret="s3cret",
            clock=lambda: time.time() + ahead_s,
        )
        port = await server.start("127.0.0.1", port)
        server.engine_up(info("d0"))
        server.engine_state(state("d0", 1))
        return server, port

    newer, port = await started("newer", 0, ahead_s=3600.0)
    gateway = DirectoryClient(f"127.0.0.1:{port}", "g0", secret="s3cret")
    await gateway.start()
    try:
        await until(lambda: gateway.connected)
        await newer.stop(0.1)
        older, _ = await started("older", port, ahead_s=0.0)
        assert older.term < newer.term
        with pytest.raises(DirectoryUnavailable, match="ABORTED"):
            await gateway.place(ask("a"))
        assert older.table.conversations.get("a") is None
        assert not gateway.connected
        other = DirectoryClient(f"127.0.0.1:{port}", "g1", secret="s3cret")
        await other.start()
        placed, _ = await other.place(ask("a"))
        assert isinstance(placed, Placed)
        await other.stop()
        await older.stop(0.1)
    finally:
        await gateway.stop()
