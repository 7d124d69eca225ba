"""Disks of simulated hosts: real files and the real SQLite, above a layer that records and fails writes.

A shim below SQLite (a VFS) sees each write and each sync. A loss of power undoes writes that were not synced:
any part of them may have reached the disk, in any order. A crash of a process loses nothing that it wrote.
After a crash or a loss of power, the next life of the process gets a copy of the files, because the former
life, which only the simulation has ended, still holds them open.
"""

import ctypes
import ctypes.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

FULL, WRITE_ERROR, SYNC_ERROR = 13, 10 | (3 << 8), 10 | (4 << 8)  # SQLITE_FULL and two of SQLITE_IOERR
ENOSPC = 28


@dataclass
class Unsynced:
    """A write that has not been synced yet."""

    offset: int
    before: bytes
    size: int  # of the file before the write
    data: bytes | None  # None: the file was cut to `offset`


@dataclass
class File:
    unsynced: list[Unsynced] = field(default_factory=list)


class Disk:
    """Disk of one host, which can be full, slow or failing, and can lose writes that were not synced."""

    def __init__(self, root: Path, name: str, random: Random) -> None:
        self.slow_s = 0.0  # added to the duration of each call of a thread
        self.full = self.fails = False  # `full`: writes fail; `fails`: writes and syncs fail
        self.loses_syncs = False  # a deliberate bug: a sync does nothing
        self.writes = 0
        self.at_sync: Callable[[], None] | None = None  # what to do at the next sync
        self.at_write: tuple[int, Callable[[], None]] | None = None  # number of a write, and what to do at it
        self._root, self._name, self._random = root, name, random
        self._life = 0
        self._files: dict[str, File] = {}
        self.path = root / f"{name}-0"
        self.path.mkdir(parents=True)
        _DISKS[str(self.path)] = self

    def remount(self, *, power_lost: bool) -> None:
        """Copy the files, as the last life of a process left them, to a new path for its next life."""
        contents = {}
        for file in self.path.rglob("*"):
            if file.is_file() and not file.name.endswith("-shm"):
                content = file.read_bytes()
                if power_lost:
                    content = self._surviving(content, self._files.get(str(file)) or File())
                contents[file.relative_to(self.path)] = content
        _DISKS.pop(str(self.path), None)
        shutil.rmtree(self.path, ignore_errors=True)  # its open files live on in the former life
        self._life += 1
        self._files.clear()
        self.at_write = self.at_sync = None
        self.path = self._root / f"{self._name}-{self._life}"
        self.path.mkdir(parents=True)
        for name, content in contents.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content)
        _DISKS[str(self.path)] = self

    def copy(self, name: str) -> "Disk":
        """Return a disk for another host, with copies of this disk's files."""
        made = Disk(self._root, name, Random(self._random.random()))
        shutil.copytree(self.path, made.path, ignore=shutil.ignore_patterns("*-shm"), dirs_exist_ok=True)
        return made

    def _surviving(self, content: bytes, file: File) -> bytes:
        """Return a file's content after a loss of power: any of its unsynced writes may be missing or cut."""
        for one in reversed(file.unsynced):
            end = one.offset + len(one.data or b"")
            content = content[: one.offset] + one.before + content[max(end, one.offset + len(one.before)) :]
            content = content[: one.size].ljust(one.size, b"\0")
        for one in file.unsynced:
            if self._random.random() < 0.5:
                continue
            data = one.data
            if data is None:
                content = content[: one.offset]
                continue
            if self._random.random() < 0.2:
                data = data[: self._random.randrange(len(data) + 1)]
            content = content.ljust(one.offset, b"\0")
            content = content[: one.offset] + data + content[one.offset + len(data) :]
        return content

    # Called by the shims

    def will_write(self, path: str, offset: int, data: bytes | None) -> int:
        """Record a write before it happens; return SQLite's error if it is to fail."""
        self.writes += 1
        if self.at_write is not None and self.writes >= self.at_write[0]:
            strike, self.at_write = self.at_write[1], None
            strike()
            return WRITE_ERROR
        if self.fails:
            return WRITE_ERROR
        if self.full and data is not None:
            return FULL
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            size = 0
        before = b""
        if offset < size:
            with open(path, "rb") as opened:
                opened.seek(offset)
                before = opened.read(size - offset if data is None else len(data))
        self._files.setdefault(path, File()).unsynced.append(Unsynced(offset, before, size, data))
        return 0

    def will_sync(self, path: str) -> int:
        if self.fails:
            return SYNC_ERROR
        if not self.loses_syncs:
            self._files.setdefault(path, File()).unsynced.clear()
        if self.at_sync is not None:
            strike, self.at_sync = self.at_sync, None
            strike()
        return 0


_DISKS: dict[str, Disk] = {}  # by the folder that it is mounted at


def disk_of(path: str) -> Disk | None:
    folder = os.path.dirname(path)
    while folder not in _DISKS and len(folder) > 1:
        folder = os.path.dirname(folder)
    return _DISKS.get(folder)


# The shim below SQLite: copies of the tables of functions of its own VFS, with a few functions replaced.

_POINTERS = ctypes.c_void_p * 24
_Open = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)
_Write = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_Truncate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_Sync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_Sleep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_OPEN, _SLEEP = 5, 14  # places in the table of a VFS
_WRITE, _TRUNCATE, _SYNC, _METHODS = 3, 4, 5, 19  # places in the table of a file, and its length
_kept: list[Any] = []  # objects that C holds pointers to


def install() -> None:
    """Install the recording layer below every database that this process opens, and below `os.pwrite`."""
    import _sqlite3

    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = ctypes.c_void_p
    original = library.sqlite3_vfs_find(None)
    vfs = _POINTERS.from_buffer_copy(_POINTERS.from_address(original))
    opens = ctypes.cast(vfs[_OPEN], _Open)
    names: dict[int, str] = {}
    tables: dict[int, Any] = {}

    def open_(_: Any, name: int | None, file: int, flags: int, out_flags: int) -> int:
        code = opens(original, name, file, flags, out_flags)  # SQLite keeps the pointer to the name
        path = ctypes.string_at(name).decode() if name is not None else ""
        if code == 0 and disk_of(path) is not None:
            methods = ctypes.c_void_p.from_address(file)
            if methods.value is not None:
                names[file] = path
                methods.value = ctypes.addressof(_patched(methods.value, names, tables))
        return int(code)

    def sleep(_: Any, microseconds: int) -> int:
        return microseconds

    for place, function in ((_OPEN, _Open(open_)), (_SLEEP, _Sleep(sleep))):
        _kept.append(function)
        vfs[place] = ctypes.cast(function, ctypes.c_void_p).value
    name = ctypes.create_string_buffer(b"simulated")
    vfs[3] = ctypes.addressof(name)
    _kept.extend((vfs, name, library))
    library.sqlite3_vfs_register(ctypes.byref(vfs), 1)
    _shim_pwrite()


def _patched(original: int, names: dict[int, str], tables: dict[int, Any]) -> Any:
    if original in tables:
        return tables[original]
    table = tables[original] = _POINTERS()
    ctypes.memmove(table, original, _METHODS * ctypes.sizeof(ctypes.c_void_p))
    writes, cuts = ctypes.cast(table[_WRITE], _Write), ctypes.cast(table[_TRUNCATE], _Truncate)

    def write(file: int, data: int, size: int, offset: int) -> int:
        disk = disk_of(names[file])
        if disk is None:  # the file belongs to a former life
            return WRITE_ERROR
        code = disk.will_write(names[file], offset, ctypes.string_at(data, size))
        return code or int(writes(file, data, size, offset))

    def truncate(file: int, size: int) -> int:
        disk = disk_of(names[file])
        code = WRITE_ERROR if disk is None else disk.will_write(names[file], size, None)
        return code or int(cuts(file, size))

    def sync(file: int, _: int) -> int:
        disk = disk_of(names[file])
        return SYNC_ERROR if disk is None else disk.will_sync(names[file])

    for place, function in ((_WRITE, _Write(write)), (_TRUNCATE, _Truncate(truncate)), (_SYNC, _Sync(sync))):
        _kept.append(function)
        table[place] = ctypes.cast(function, ctypes.c_void_p).value
    return table


def _shim_pwrite() -> None:
    pwrite = os.pwrite

    def shimmed(descriptor: int, data: Any, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        if (disk := disk_of(path)) is not None and disk.will_write(path, offset, bytes(data)):
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return pwrite(descriptor, data, offset)

    os.pwrite = shimmed
