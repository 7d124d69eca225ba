"""A journal that is not what was written is refused, and its repair loses what was hit and nothing else."""

import asyncio
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from router.directory import wal
from router.directory.journal import Journal, JournalError, Row, log_of
from router.directory.repair import salvage
from tests.router.directory.test_journal import contents, copied

ROWS = 120


def row(number: int, size: int = 50) -> Row:
    return Row(f"c:{number}", "whole", b'{"n": "%d"}' % (number * 10**size))


async def written(path: Path, rows: int = ROWS, *, logged: bool) -> list[Row]:
    """`logged`: the file as a kill leaves it, most of it in the log."""
    journal = Journal(path)
    for number in range(rows):
        journal.append(row(number))
        if number % 5 == 4:
            await journal.durable()
    await journal.durable()
    if logged:
        copied(path, path.parent / "killed")
    await journal.close()
    return [row(number) for number in range(rows)]


def flip(file: Path, at: int, bit: int = 3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def read(path: Path) -> list[Row]:
    return asyncio.run(contents(path))


def test_a_flipped_bit_in_the_log_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    asyncio.run(written(tmp_path / "journal", logged=True))
    whole = tmp_path / "killed" / "journal"
    assert len(read(copied(whole, tmp_path / "same"))) == ROWS
    size = log_of(whole).stat().st_size
    choose = random.Random(1)
    for attempt in range(12):
        path = copied(whole, tmp_path / f"flipped-{attempt}")
        flip(log_of(path), choose.randrange(32, size // 2), choose.randrange(8))
        before = log_of(path).read_bytes()
        with pytest.raises(JournalError, match=r"damaged: frame \d+ of .*`conserve journal repair"):
            Journal(path)
        assert log_of(path).read_bytes() == before
        left = salvage(path)
        assert {one.subject for one in left.rows} <= {f"c:{number}" for number in range(ROWS)}
        assert all(one == row(int(one.subject[2:])) for one in left.rows)
        assert len(left.rows) >= ROWS - 1, (attempt, left.lost)


def test_a_damaged_head_of_the_log_is_refused_and_repaired(tmp_path: Path) -> None:
    asyncio.run(written(tmp_path / "journal", logged=True))
    path = tmp_path / "killed" / "journal"
    for at in (0, 9, 17, 30):
        path = copied(tmp_path / "killed" / "journal", tmp_path / f"head-{at}")
        flip(log_of(path), at)
        with pytest.raises(JournalError, match="the head of its log"):
            Journal(path)
        assert len(salvage(path).rows) == ROWS


def test_a_flipped_bit_in_the_file_is_refused_or_hits_nothing(tmp_path: Path) -> None:
    expected = asyncio.run(written(tmp_path / "journal", logged=False))
    size = (tmp_path / "journal").stat().st_size
    choose, refused = random.Random(2), 0
    for attempt in range(50):
        path = copied(tmp_path / "journal", tmp_path / f"flipped-{attempt}")
        flip(path, choose.randrange(size), choose.randrange(8))
        try:
            assert read(path) == expected
        except JournalError as said:
            refused += 1
            assert "conserve journal repair" in str(said)
            left = salvage(path)
            assert all(one == row(int(one.subject[2:])) for one in left.rows)
            assert len(left.rows) >= ROWS - 60, (attempt, left.lost[:3])  # a page of names, or of rows
    assert refused > 20


def test_what_two_crashes_tore_is_behind_what_was_kept(tmp_path: Path) -> None:
    asyncio.run(written(tmp_path / "journal", 100, logged=True))
    path = tmp_path / "killed" / "journal"
    for attempt in range(4):
        path = copied(tmp_path / "killed" / "journal", tmp_path / f"once-{attempt}")
        torn(log_of(path), attempt)
        first = read(copied(path, tmp_path / f"looked-{attempt}"))
        assert 95 <= len(first) < 100
        again = asyncio.run(more(path))
        torn(log_of(again), attempt)
        second = read(again)
        assert second[: len(first)] == first
        assert len(first) + 15 <= len(second) < len(first) + 20


def torn(log: Path, how: int) -> None:
    """The last commit, as a power cut leaves it: cut off, or the last page not what was written."""
    if how % 2:
        os.truncate(log, log.stat().st_size - 5 - 400 * how)
    else:
        flip(log, log.stat().st_size - 4096 // (how + 2))


async def more(path: Path) -> Path:
    journal = Journal(path)
    for number in range(1000, 1020):
        journal.append(row(number))
        if number % 5 == 4:
            await journal.durable()
    again = copied(path, path.parent / "again")
    await journal.close()
    return again


def test_repair_keeps_the_former_files_and_the_journal_opens(tmp_path: Path) -> None:
    asyncio.run(written(tmp_path / "journal", logged=True))
    path = tmp_path / "killed" / "journal"
    flip(log_of(path), log_of(path).stat().st_size // 3)
    before = path.read_bytes(), log_of(path).read_bytes()
    looked = CliRunner().invoke(app, ["journal", "repair", str(path)])
    assert looked.exit_code == 0
    assert "lost: " in looked.output and "nothing was changed" in looked.output
    assert (path.read_bytes(), log_of(path).read_bytes()) == before
    done = CliRunner().invoke(app, ["journal", "repair", str(path), "--yes"])
    assert "repaired" in done.output, done.output
    [kept] = path.parent.glob("journal.damaged-*[0-9]")
    assert (kept.read_bytes(), log_of(kept).read_bytes()) == before
    assert len(read(path)) >= ROWS - 1


def test_a_journal_in_use_is_not_repaired(tmp_path: Path) -> None:
    async def using() -> None:
        journal = Journal(tmp_path / "journal")
        with pytest.raises(JournalError, match="in use"):
            await asyncio.to_thread(in_another_process, tmp_path / "journal")
        await journal.close()

    asyncio.run(using())


def in_another_process(path: Path) -> None:
    """Locks of one process do not hold for itself."""
    pid = os.fork()
    if pid == 0:
        try:
            salvage(path)
        except JournalError:
            os._exit(7)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7:
        raise JournalError("in use")


VERSION_1 = """
CREATE TABLE rows (id INTEGER PRIMARY KEY, subject TEXT, slot TEXT, payload BLOB, UNIQUE (subject, slot));
PRAGMA user_version = 1;
"""


def test_a_journal_of_version_1_opens(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.executescript(VERSION_1)
        for number in range(3):
            one = row(number)
            old.execute(
                "INSERT INTO rows (subject, slot, payload) VALUES (?, ?, ?)",
                (one.subject, one.slot, one.payload),
            )
        old.commit()
    assert [one.subject for one in salvage(path).rows] == ["c:0", "c:1", "c:2"]
    assert read(path) == [row(number) for number in range(3)]
    assert read(path) == [row(number) for number in range(3)]
    with closing(sqlite3.connect(path)) as new:
        assert new.execute("PRAGMA user_version").fetchone() == (2,)


def test_our_sums_of_a_log_are_those_of_sqlite(tmp_path: Path) -> None:
    asyncio.run(written(tmp_path / "journal", logged=True))
    log = wal.read(log_of(tmp_path / "killed" / "journal"))
    assert log is not None
    assert log.good and all(frame.good for frame in log.frames)
    assert len(log.frames) > 24
    assert log.mended(with_bad=True)[:24][16:] == log_of(tmp_path / "killed" / "journal").read_bytes()[16:24]
