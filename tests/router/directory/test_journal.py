"""Rows that the journal has acknowledged survive crashes, full disks and newer versions."""

import asyncio
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from prometheus_client import REGISTRY

from router.directory.journal import MAX_UNWRITTEN, VERSION, Journal, JournalError, Row
from router.directory.journal_records import remembered
from tests.support.waiting import until


def row(number: int) -> Row:
    return Row(f"c:{number}", "whole", b"%d" % number)


async def contents(path: Path) -> list[Row]:
    journal = Journal(path)
    found = journal.read()
    await journal.close()
    return found


async def test_durable_rows_are_read_back_in_the_order_of_writing(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "journal"
    journal = Journal(path)
    assert journal.read() == []
    for number in (3, 1, 2, 3):  # the third row is written again
        journal.append(row(number))
    await journal.durable()
    await journal.close()
    assert await contents(path) == [row(1), row(2), row(3)]


async def test_a_row_without_payload_deletes_one_slot_or_a_whole_subject(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    kept = [Row("c:a", "whole", b"1"), Row("e:a", "whole", b"2")]
    for one in (*kept, Row("c:a", "binding", b"3"), Row("c:b", "whole", b"4"), Row("c:b", "n:1", b"5")):
        journal.append(one)
    await journal.durable()
    for one in (Row("c:a", "binding"), Row("c:b"), Row("c:never")):
        journal.append(one)
    await journal.close()
    assert await contents(tmp_path / "journal") == kept


async def test_rows_reach_the_disk_soon_even_if_no_caller_waits_for_them(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(row(1))
    await asyncio.sleep(0.5)
    assert await contents(copied(path, tmp_path / "copy")) == [row(1)]
    await journal.close()


async def test_callers_that_wait_together_share_one_commit(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    before = pages_written(path)

    async def one(number: int) -> None:
        journal.append(row(number))
        await journal.durable()

    await asyncio.gather(*(one(number) for number in range(500)))
    assert pages_written(path) - before < 100  # each commit writes at least one page
    await journal.close()
    assert len(await contents(path)) == 500


def pages_written(path: Path) -> int:
    return path.with_name("journal-wal").stat().st_size // 4096


def copied(path: Path, folder: Path) -> Path:
    """Copy a journal's files to `folder`, in the state in which a crash at this moment would leave them."""
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        if file.is_file():
            shutil.copy(file, folder / file.name)
    return folder / path.name


async def test_a_journal_with_a_torn_end_loses_only_the_torn_rows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for number in range(40):
        journal.append(row(number))
        await journal.durable()
    random.seed(1)
    lengths = []
    for attempt in range(12):
        crashed = copied(path, tmp_path / f"crash-{attempt}")
        log = crashed.with_name("journal-wal")
        size = log.stat().st_size
        if attempt % 2:
            os.truncate(log, random.randrange(size - 4096, size))
        else:  # or with changed bytes
            with log.open("r+b") as file:
                file.seek(random.randrange(size - 4096, size - 32))  # of the last commit
                file.write(b"torn" * 8)
        found = await contents(crashed)
        assert found == [row(number) for number in range(len(found))]
        lengths.append(len(found))
    assert lengths == [39] * 12
    await journal.close()


KILLED = """
import asyncio, sys
from pathlib import Path
from router.directory.journal import Journal, Row
async def main():
    journal = Journal(Path(sys.argv[1]))
    for number in range(1_000_000):
        journal.append(Row(f"c:{number}", "whole", b"%d" % number))
        if number % 3 == 0:
            await journal.durable()
            print(number, flush=True)
asyncio.run(main())
"""


def test_acknowledged_rows_survive_a_kill_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    while int(process.stdout.readline()) < 300:
        pass
    process.send_signal(signal.SIGKILL)
    acknowledged = max(int(line) for line in ("300", *process.stdout.read().split()))
    process.wait()
    found = asyncio.run(contents(path))
    assert found == [row(number) for number in range(len(found))]
    assert len(found) > acknowledged


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Make the disk seem full: limit this process's files to the journal's current size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name("journal-wal").stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_rows_refused_by_a_full_disk_are_written_once_there_is_space(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(row(1))
    await journal.durable()
    journal.append(row(2))
    with full_disk(tmp_path / "journal"), pytest.raises(JournalError, match="free space or fix the disk"):
        await journal.durable()
    journal.append(row(3))
    await journal.durable()
    await journal.close()
    assert await contents(tmp_path / "journal") == [row(1), row(2), row(3)]


async def test_two_processes_cannot_share_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(JournalError, match="another directory"):
        Journal(tmp_path / "journal")
    await journal.close()
    await Journal(tmp_path / "journal").close()


async def test_a_journal_of_another_kind_or_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"\x2a\x00\x00\x00" + b"\x11" * 8 + b'{"k": "engine"}' * 100)
    before = old.read_bytes()
    with pytest.raises(JournalError, match="Move it away"):
        Journal(old)
    assert old.read_bytes() == before
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute(f"PRAGMA user_version = {VERSION + 1}")
    newer.close()
    with pytest.raises(JournalError, match=f"of version {VERSION + 1}, and this is version {VERSION}"):
        Journal(tmp_path / "newer")


class WrittenNext(bytes):
    """Payload whose first write fails with an error that SQLite does not raise."""

    failed = False

    def __conform__(self, _: object) -> bytes:
        if not self.failed:
            self.failed = True
            raise OverflowError("not now")
        return bytes(self)


async def test_a_row_whose_write_failed_is_written_at_the_next_try(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(row(1))
    journal.append(Row("c:2", "whole", WrittenNext(b"2")))
    with pytest.raises(JournalError, match="not now"):
        await journal.durable()
    journal.append(row(3))
    await journal.durable()
    await journal.close()
    assert await contents(tmp_path / "journal") == [row(1), row(2), row(3)]


async def test_a_row_that_can_never_be_written_is_refused_and_delays_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for never in (Row("c:\ud800", "whole", b"1"), Row("c:a", "n:\udfff", b"1")):
        with pytest.raises(JournalError, match="no text that a journal can hold"):
            journal.append(never)
    journal.append(row(1))
    await journal.durable()
    await journal.close()
    assert await contents(tmp_path / "journal") == [row(1)]


def refuses(journal: Journal) -> bool:
    try:
        journal.check_capacity()
    except JournalError:
        return True
    return False


async def test_a_journal_refuses_new_work_until_a_full_disk_accepts_rows_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(row(0))
    await journal.durable()
    written = pages_written(path)
    with full_disk(path):
        for number in range(MAX_UNWRITTEN + 1):
            journal.append(row(number))
        journal.check_capacity()  # many rows are accepted while the disk takes them
        with pytest.raises(JournalError, match="free space"):
            await journal.durable()
        with pytest.raises(JournalError, match="free space"):
            journal.check_capacity()
    await until(lambda: pages_written(path) > written)
    await until(lambda: not refuses(journal))
    await journal.close()


class WrittenLate(bytes):
    """Payload whose write hangs until the event `answers` is set."""

    answers = threading.Event()

    def __conform__(self, _: object) -> bytes:
        self.answers.wait()
        return bytes(self)


async def test_a_journal_treats_a_hanging_disk_as_a_failing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.directory.journal.LATE_S", 0.3)
    path, journal = tmp_path / "journal", Journal(tmp_path / "journal")
    hanging = WrittenLate(b"0")
    journal.append(Row("c:0", "whole", hanging))
    for number in range(1, MAX_UNWRITTEN + 1):
        journal.append(row(number))
    journal.check_capacity()
    waiting = [asyncio.create_task(journal.durable()) for _ in range(3)]
    async with asyncio.timeout(5):
        refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, JournalError) and "has not answered" in str(one) for one in refused)
    with pytest.raises(JournalError, match="has not answered"):
        journal.check_capacity()
    hanging.answers.set()
    await until(lambda: not refuses(journal))
    await journal.durable()
    await journal.close()
    assert len(await contents(path)) == MAX_UNWRITTEN + 1


def unwritten() -> float | None:
    return REGISTRY.get_sample_value("conserve_journal_unwritten_rows")


def missed() -> float:
    return REGISTRY.get_sample_value("conserve_journal_rows_missed_total") or 0.0


async def test_counts_and_prompt_ends_are_dropped_while_too_many_rows_wait_for_a_full_disk(
    tmp_path: Path,
) -> None:
    """Bound conversations continue, but with too many unwritten rows their counters are not updated."""
    path, before = tmp_path / "journal", missed()
    journal = Journal(path)
    journal.append(row(0))
    await journal.durable()
    with full_disk(path):
        for number in range(MAX_UNWRITTEN + 1):
            journal.append(row(number))
        with pytest.raises(JournalError):
            await journal.durable()
        assert unwritten() == MAX_UNWRITTEN + 1
        for number in range(50_000):
            journal.append(Row("c:1", f"n:{number}", b"1"))
            journal.append(Row("c:1", "turns", b"2"))
        journal.append(Row("c:1"))  # the row that ends the conversation is not dropped
    assert missed() == before + 100_000
    await until(lambda: not refuses(journal))
    await journal.close()
    assert unwritten() == 0
    found = await contents(path)
    assert len(found) == MAX_UNWRITTEN
    assert not any(one.subject == "c:1" for one in found)


ENGINE = {"engine": "d0", "tier": "t", "role": "decode", "epoch": 5, "http": "h:1"}
SIZES = {"transfer": "", "control": "", "kv_tokens": 100, "block_tokens": 16, "max_context": 50}
CONVERSATION = {"key": "a", "parent": None, "created_at": 1.0, "used_at": 2.0}


def test_fields_that_a_newer_version_wrote_to_a_journal_are_ignored() -> None:
    rows = [
        Row("e:d0", "whole", orjson.dumps({**ENGINE, **SIZES, "newer": 1})),
        Row("c:a", "whole", orjson.dumps({**CONVERSATION, "newer": 1})),
        Row("c:a", "turns", orjson.dumps({"turns": 3, "newer": 1})),
        Row("c:a", "binding", orjson.dumps(["d0", 5, 1.0, "newer"])),
    ]
    found = remembered(rows)
    assert [(one.engine, one.role, one.epoch) for one in found.engines] == [("d0", "decode", 5)]
    [(conversation, bound, _)] = found.conversations
    assert (conversation.key, conversation.turns, bound) == ("a", 3, ("d0", 5, 1.0))


@pytest.mark.parametrize(
    "row",
    [
        Row("e:d0", "whole", orjson.dumps(ENGINE)),
        Row("e:d0", "whole", orjson.dumps({**ENGINE, **SIZES, "role": "newer"})),
        Row("c:a", "whole", b"[1]"),
        Row("c:a", "whole", b"not JSON"),
    ],
)
def test_a_row_that_cannot_be_decoded_is_reported_in_a_sentence(row: Row) -> None:
    with pytest.raises(JournalError, match=r"cannot be read .* newer version"):
        remembered([row])
