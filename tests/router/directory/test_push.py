"""A gateway's new process supersedes its former process, whose turns count as ended."""

from pathlib import Path

import pytest

from placement.routing.receipts import Refusal
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import Ask, Engines, Push, Spent
from router.directory.api.push import GatewayStreams, process_name, supersedes
from router.directory.journal import Journal, JournalError
from router.identity.prefix_chain import of_messages, seed
from tests.support.fake_fleet import fleet
from tests.support.waiting import until


def test_only_a_later_process_supersedes_a_gateway_of_the_same_name() -> None:
    first, second = process_name("gateway-1"), process_name("gateway-1")
    assert supersedes(second, first)
    assert not supersedes(first, second)
    assert not supersedes(first, first)
    assert not supersedes(process_name("gateway-10"), first)
    assert not supersedes(process_name("my.gateway-1"), first)


def test_usage_that_gateways_report_is_summed_until_a_slow_stream_takes_it() -> None:
    streams = GatewayStreams()
    slow = streams.join("slow")
    for _ in range(2000):
        streams.tell_spent("a", [Spent(f"k{number}", 1, 10, number) for number in range(100)])
        streams.tell_spent("b", [Spent("k0", 1, -3, 7)])
    assert not slow.overrun
    spent = slow.take(lambda: Engines((), True)).spent
    assert len(spent) == 101
    assert ("a", Spent("k5", 2000, 20_000, 5)) in spent and ("b", Spent("k0", 2000, -6000, 7)) in spent
    assert slow.take(lambda: Engines((), True)) == Push()


async def test_a_new_gateway_process_replaces_one_whose_stream_still_seems_open(tmp_path: Path) -> None:
    """The stream of the former process seems open, because its machine vanished without closing it."""
    async with fleet(tmp_path, gateways=0, gateway_grace_s=600.0) as made:
        chain = of_messages(seed("s", "m"), [{"role": "user", "content": "x" * 100}])
        old = DirectoryClient(made.address, "g", secret="s3cret")
        await old.start()
        await until(lambda: len(old.engines))
        placed, _ = await old.place(Ask("s:a", "", 100, 1.0, end=chain.end, turn=old.next_turn()))
        assert not isinstance(placed, Refusal)

        other = DirectoryClient(made.address, "h", secret="s3cret")
        found, running = await other.find(chain)
        assert found is not None and running("s:a")

        new = DirectoryClient(made.address, "g", secret="s3cret")
        await new.start()
        await until(lambda: len(new.engines))
        found, running = await new.find(chain)
        assert found is not None and not running("s:a")
        for client in (old, other, new):
            await client.stop()


async def test_a_gateway_that_reconnects_learns_that_another_moved_its_conversation(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, gateways=0, decoders=2) as made:
        clients = [DirectoryClient(made.address, name, secret="s3cret") for name in ("g", "h")]
        for client in clients:
            await client.start()
        one, other = clients
        await until(lambda: len(one.engines) and len(other.engines))
        first, _ = await one.place(Ask("s:a", "", 100, 1.0, turn=one.next_turn()))
        assert not isinstance(first, Refusal)
        made.directory.gateways.close()  # so that clients open their streams again
        await until(lambda: not len(made.directory.gateways))
        lost = first.engine, first.epoch
        moved, _ = await other.place(Ask("s:a", "", 100, 1.0, lost=lost, turn=other.next_turn()))
        assert not isinstance(moved, Refusal) and moved.engine != first.engine
        await until(lambda: one.bound("s:a") is None)
        assert one.cache.elsewhere["s:a"] == (moved.engine, moved.epoch)
        for client in clients:
            await client.stop()


async def test_a_gateway_that_connects_while_the_disk_fails_is_told_of_the_bindings_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(journal: Journal) -> None:
        raise JournalError("the disk is full")

    async with fleet(tmp_path, gateways=0) as made:
        one, other = (DirectoryClient(made.address, name, secret="s3cret") for name in ("g", "h"))
        await one.start()
        await until(lambda: len(one.engines))
        placed, _ = await one.place(Ask("s:a", "", 100, 1.0, turn=one.next_turn()))
        assert not isinstance(placed, Refusal)
        with monkeypatch.context() as full:
            full.setattr(Journal, "durable", fails)
            await other.start()
            await until(lambda: len(other.engines))
            assert "s:a" not in other.cache.elsewhere
        await until(lambda: other.cache.elsewhere.get("s:a") == (placed.engine, placed.epoch))
        for client in (one, other):
            await client.stop()
