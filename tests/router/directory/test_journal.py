"""What the journal acknowledged is there after a crash, and nothing else is needed to read it back."""

import asyncio
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.directory.journal import Journal, JournalError, frame, read


@given(st.lists(st.binary(max_size=50)), st.integers(0, 200))
def test_a_torn_tail_costs_only_the_torn_record(payloads: list[bytes], cut: int) -> None:
    data = b"".join(map(frame, payloads))
    whole = data[: max(0, len(data) - cut)]
    records, size = read(whole)
    assert records == payloads[: len(records)]
    assert whole[:size] == b"".join(map(frame, records))
    assert len(whole) - size < len(frame(payloads[len(records)])) if len(records) < len(payloads) else True


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1), st.data())
def test_a_flipped_bit_is_never_read_as_a_record(payloads: list[bytes], data: st.DataObject) -> None:
    log = bytearray(b"".join(map(frame, payloads)))
    at = data.draw(st.integers(0, len(log) - 1))
    log[at] ^= 1 << data.draw(st.integers(0, 7))
    records, _ = read(bytes(log))
    assert records == payloads[: len(records)]
    assert len(records) < len(payloads)


async def test_what_was_durable_is_replayed_and_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert journal.open() == []
    for number in range(100):
        journal.append(b"%d" % number)
    await journal.durable()
    await journal.close()
    with path.open("ab") as file:
        file.write(frame(b"torn")[:-2])
    again = Journal(path)
    assert again.open() == [b"%d" % number for number in range(100)]
    again.append(b"after")
    await again.close()
    last = Journal(path)
    assert last.open()[-2:] == [b"99", b"after"]
    await last.close()


async def test_many_waiters_share_a_sync(tmp_path: Path) -> None:
    syncs = 0

    def sync(fd: int) -> None:
        nonlocal syncs
        syncs += 1
        os.fdatasync(fd)

    journal = Journal(tmp_path / "journal", sync)
    journal.open()

    async def one(number: int) -> None:
        journal.append(b"%d" % number)
        await journal.durable()

    await asyncio.gather(*(one(number) for number in range(500)))
    await journal.close()
    assert syncs <= 5


async def test_compaction_loses_nothing_that_is_appended_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.open()
    state: dict[int, int] = {}
    rng = random.Random(3)
    stop = False

    def put(key: int, value: int) -> None:
        state[key] = value
        journal.append(b"%d=%d" % (key, value))

    async def writer() -> None:
        step = 0
        while not stop:
            put(rng.randrange(2000), step)
            step += 1
            if step % 7 == 0:
                await journal.durable()
            else:
                await asyncio.sleep(0)

    for key in range(2000):
        put(key, -1)
    task = asyncio.create_task(writer())
    for _ in range(5):
        await asyncio.sleep(0.01)
        before = journal.size
        await journal.compact(b"%d=%d" % (key, state[key]) for key in list(state))
        assert journal.size < before + 2000 * 30
    stop = True
    await task
    await journal.close()
    replayed: dict[int, int] = {}
    again = Journal(path)
    for record in again.open():
        key, _, value = record.partition(b"=")
        replayed[int(key)] = int(value)
    await again.close()
    assert replayed == state


async def test_a_full_disk_is_an_error_for_who_waits_and_is_tried_again(tmp_path: Path) -> None:
    full = True

    def sync(fd: int) -> None:
        if full:
            raise OSError(28, "No space left on device")

    journal = Journal(tmp_path / "journal", sync)
    journal.open()
    journal.append(b"one")
    with pytest.raises(JournalError, match="No space"):
        await journal.durable()
    full = False
    journal.append(b"two")
    await journal.durable()
    await journal.close()
    again = Journal(tmp_path / "journal")
    assert again.open() == [b"one", b"two"]
    await again.close()


async def test_two_processes_cannot_share_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.open()
    with pytest.raises(JournalError, match="another directory"):
        Journal(tmp_path / "journal")
    await journal.close()
