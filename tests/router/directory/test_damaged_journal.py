"""A damaged journal is refused; a repair keeps the readable rows and the damaged files."""

import asyncio
import os
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.application import app
from router.directory.journal import Journal, JournalError, Row, check, salvage
from tests.router.directory.test_journal import contents, copied

ROWS = 120
COMMITS = ROWS // 5


def row(number: int, size: int = 50) -> Row:
    return Row(f"c:{number}", "whole", b'{"n": "%d"}' % (number * 10**size))


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


async def written(path: Path, rows: int = ROWS, *, killed: bool) -> Path:
    """Write a journal of `rows` rows, five in a commit. With `killed`, most stay in SQLite's log."""
    journal = Journal(path)
    for number in range(rows):
        journal.append(row(number))
        if number % 5 == 4:
            await journal.durable()
    left = copied(path, path.parent / "killed") if killed else path
    await journal.close()
    return left


def flip(file: Path, at: int, bit: int = 3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def read(path: Path) -> list[Row]:
    return asyncio.run(contents(path))


def test_a_journal_with_a_flipped_bit_in_its_log_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    whole = asyncio.run(written(tmp_path / "journal", killed=True))
    assert len(read(copied(whole, tmp_path / "same"))) == ROWS
    size = log_of(whole).stat().st_size
    choose = random.Random(1)
    for attempt in range(20):
        path = copied(whole, tmp_path / f"flipped-{attempt}")
        flip(log_of(path), choose.randrange(size // 2), choose.randrange(8))
        before = path.read_bytes(), log_of(path).read_bytes()
        with pytest.raises(JournalError, match=r"transactions are missing.*`conserve journal repair"):
            Journal(path)
        assert (path.read_bytes(), log_of(path).read_bytes()) == before


def test_a_journal_with_a_flipped_bit_is_refused_unless_all_rows_are_intact(tmp_path: Path) -> None:
    whole = asyncio.run(written(tmp_path / "journal", killed=False))
    size, expected = whole.stat().st_size, [row(number) for number in range(ROWS)]
    choose, refused = random.Random(2), 0
    for attempt in range(50):
        path = copied(whole, tmp_path / f"flipped-{attempt}")
        flip(path, choose.randrange(size), choose.randrange(8))
        try:
            assert read(path) == expected
        except JournalError as error:
            refused += 1
            assert "conserve journal repair" in str(error)
            rows, _ = salvage(path)
            assert set(rows) <= set(expected)
    assert refused > 20


def test_a_journal_with_a_flipped_bit_in_its_last_commit_loses_only_that_commit(tmp_path: Path) -> None:
    path = asyncio.run(written(tmp_path / "journal", killed=True))
    flip(log_of(path), log_of(path).stat().st_size - 100)
    assert read(path) == [row(number) for number in range(ROWS - 5)]


def test_a_journal_whose_file_was_cut_is_refused(tmp_path: Path) -> None:
    whole = asyncio.run(written(tmp_path / "journal", killed=False))
    killed = tmp_path / "killed" / "journal"
    copied(whole, killed.parent)
    for name, left in (("half", 0.5), ("page", 0.9), ("empty", 0.0)):
        path = copied(killed, tmp_path / name)
        os.truncate(path, int(path.stat().st_size * left) // 4096 * 4096)
        with pytest.raises(JournalError, match="is damaged"):
            check(path)


def test_a_journal_whose_log_was_cut_or_removed_is_refused(tmp_path: Path) -> None:
    whole = asyncio.run(written(tmp_path / "journal", killed=True))
    cut = copied(whole, tmp_path / "cut")
    os.truncate(log_of(cut), log_of(cut).stat().st_size // 2)
    missing = copied(whole, tmp_path / "missing")
    log_of(missing).unlink()
    for path in (cut, missing):
        with pytest.raises(JournalError, match="is damaged"):
            Journal(path)


def test_after_two_crashes_only_the_last_rows_before_each_are_lost(tmp_path: Path) -> None:
    whole = asyncio.run(written(tmp_path / "journal", 100, killed=True))
    for attempt in range(4):
        path = copied(whole, tmp_path / f"once-{attempt}")
        torn(log_of(path), attempt)
        first = read(copied(path, tmp_path / f"looked-{attempt}"))
        assert 95 <= len(first) < 100
        again = asyncio.run(more(path))
        torn(log_of(again), attempt)
        second = read(again)
        assert second[: len(first)] == first
        assert len(first) + 15 <= len(second) < len(first) + 20


def torn(log: Path, how: int) -> None:
    """Damage the last commit in a log as a power cut does: cut it off, or change its last page."""
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


async def test_an_intact_journal_is_accepted_if_its_sequence_file_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, sequence = Journal(path), tmp_path / "journal-sequence"
    numbers = []
    for number in range(10):
        journal.append(row(number))
        await journal.durable()
        numbers.append(sequence.read_bytes())
    await journal.close()
    nine, ten = numbers[-2:]
    for written_bytes in range(len(ten) + 1):
        sequence.write_bytes(ten[:written_bytes] + nine[written_bytes:])
        check(path)
    sequence.write_bytes(ten.replace(b"10", b"12"))
    with pytest.raises(JournalError, match="its last 2 transactions are missing"):
        check(path)


def test_a_directory_without_a_journal_file_starts_with_an_empty_journal(tmp_path: Path) -> None:
    path = asyncio.run(written(tmp_path / "journal", killed=False))
    path.rename(tmp_path / "elsewhere")
    assert read(path) == []
    assert read(path) == []


def test_a_repaired_journal_opens_and_its_damaged_files_are_kept(tmp_path: Path) -> None:
    path = asyncio.run(written(tmp_path / "journal", killed=True))
    flip(log_of(path), log_of(path).stat().st_size // 3)
    before = path.read_bytes(), log_of(path).read_bytes()
    looked = CliRunner().invoke(app, ["journal", "repair", str(path)])
    assert looked.exit_code == 0
    assert "rows are intact" in looked.output and "nothing was changed" in looked.output
    assert (path.read_bytes(), log_of(path).read_bytes()) == before
    done = CliRunner().invoke(app, ["journal", "repair", str(path), "--yes"])
    assert "repaired" in done.output, done.output
    [kept] = path.parent.glob("journal.damaged-*[0-9]")
    assert (kept.read_bytes(), log_of(kept).read_bytes()) == before
    found = read(path)
    assert 0 < len(found) < ROWS and found == [row(number) for number in range(len(found))]


def test_a_repair_keeps_the_rows_before_and_after_a_damaged_page(tmp_path: Path) -> None:
    path = asyncio.run(written(tmp_path / "journal", 2000, killed=False))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(bytes(4096))
    with pytest.raises(JournalError, match="is damaged"):
        check(path)
    rows, _ = salvage(path)
    assert 1900 < len(rows) <= 2000


async def test_a_journal_in_use_is_not_repaired(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(JournalError, match="in use"):
        salvage(tmp_path / "journal")
    await journal.close()
