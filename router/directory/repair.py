"""Repair of a damaged journal: the rows that are what was written, and the names of those that are not.

Works on copies. Each row is judged by its own sum, so that a damaged page costs the rows whose bytes it hit;
of the log, transactions behind a bad frame are taken too. Nothing is replaced but by `replace`, which keeps
the files as they were.
"""

import fcntl
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from router.directory import wal
from router.directory.journal import Journal, JournalError, Row, is_whole, log_of

_PAGE = 4096
_LOCKS = 0x40000002, 510  # bytes of the file where SQLite's users hold locks
_INDEXED = "SELECT id, subject, slot FROM rows INDEXED BY sqlite_autoindex_rows_1"


@dataclass(frozen=True, slots=True)
class Salvage:
    """What is left of a journal."""

    rows: tuple[Row, ...]
    lost: tuple[str, ...]  # what each was, as far as that can be read


def salvage(path: Path) -> Salvage:
    """JournalError where there is no journal, or a directory uses it."""
    _check_unused(path)
    log = wal.read(log_of(path))
    versions = [b""] if log is None else [log.mended(with_bad=True), log.mended(with_bad=False)]
    if log is not None and not log.damage:
        versions = [log_of(path).read_bytes()]
    found = [_of_copy(path, version) for version in versions]
    return min(found, key=lambda one: (len(one.lost), -len(one.rows)))


def replace(path: Path, left: Salvage, suffix: str) -> Path:
    """Put a journal with what is left in place of it; returns where the former one lies."""
    new = path.with_name(f"{path.name}.repaired")
    for former in (new, log_of(new)):
        former.unlink(missing_ok=True)
    Journal.create(new, left.rows)
    kept = path.with_name(f"{path.name}.{suffix}")
    if log_of(path).exists():
        log_of(path).replace(log_of(kept))
    path.replace(kept)
    new.replace(path)
    return kept


def _check_unused(path: Path) -> None:
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _LOCKS[1], _LOCKS[0])
    except BlockingIOError:
        raise JournalError(f"{path} is in use by a directory; stop that one first") from None
    except OSError as wrong:
        raise JournalError(f"{path}: {wrong.strerror}") from wrong


def _of_copy(path: Path, log: bytes) -> Salvage:
    with TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.repair-") as folder:
        copy = Path(folder) / "journal"
        shutil.copyfile(path, copy)
        if log:
            log_of(copy).write_bytes(log)
        with closing(sqlite3.connect(copy, isolation_level=None)) as opened:
            try:
                summed = _summed(opened)
            except sqlite3.Error:
                summed = None
        if summed is None:  # its first page: what that says is the same in every journal
            _put_first_page(copy, Path(folder))
            summed = True
        with closing(sqlite3.connect(copy, isolation_level=None)) as opened:
            return _rows(opened, summed)


def _summed(opened: sqlite3.Connection) -> bool:
    """False for a journal of version 1; an error where the first page says nothing."""
    columns = [column[1] for column in opened.execute("PRAGMA table_info(rows)")]
    if "payload" not in columns:
        raise sqlite3.DatabaseError("there is no table of rows")
    return "sum" in columns


def _put_first_page(copy: Path, folder: Path) -> None:
    Journal.create(folder / "new", ())
    page = bytearray((folder / "new").read_bytes()[:_PAGE])
    page[28:32] = (copy.stat().st_size // _PAGE).to_bytes(4, "big")
    with copy.open("r+b") as file:
        file.write(page)


def _rows(opened: sqlite3.Connection, summed: bool) -> Salvage:
    names = {id: (subject, slot) for id, subject, slot in _until_error(opened, _INDEXED)}
    forward = "SELECT id FROM rows NOT INDEXED ORDER BY id"
    for asked in (forward, f"{forward} DESC"):
        for (id,) in _until_error(opened, asked):
            names.setdefault(id, ("", ""))
    rows, lost = [], list[str]()
    asked = f"SELECT subject, slot, payload, {'sum' if summed else 'NULL'} FROM rows NOT INDEXED WHERE id = ?"
    for id in sorted(names):
        found = None
        with suppress(sqlite3.Error):
            found = opened.execute(asked, (id,)).fetchone()
        if found is not None and (is_whole(*found) if summed else _is_json(*found[:3])):
            rows.append(Row(*found[:3]))
        else:
            lost.append(_named(*names[id]))
    return Salvage(tuple(rows), tuple(lost))


def _until_error(opened: sqlite3.Connection, asked: str) -> Iterator[tuple[Any, ...]]:
    with suppress(sqlite3.Error):
        yield from opened.execute(asked)


def _is_json(subject: object, slot: object, payload: bytes) -> bool:
    with suppress(orjson.JSONDecodeError, TypeError):
        orjson.loads(payload)
        return isinstance(subject, str) and isinstance(slot, str)
    return False


def _named(subject: object, slot: object) -> str:
    if not isinstance(subject, str) or not subject:
        return "something that cannot be told"
    kinds = {"c": "conversation", "e": "engine"}
    whats = {"whole": "itself", "turns": "its counts", "binding": "its binding"}
    what = whats.get(str(slot), "the end of a prompt")
    kind, _, name = subject.partition(":")
    return f"{kinds.get(kind, kind)} {name!r}: {what}"
