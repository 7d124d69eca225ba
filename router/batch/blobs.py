"""The bytes of files: in a local folder or behind any fsspec URL."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import fsspec

CHUNK_BYTES = 1 << 20


class Writer(ABC):
    """Leaving its `with` discards what is not committed."""

    written = 0
    committed = False

    def write(self, data: bytes) -> None:
        self._write(data)
        self.written += len(data)

    def commit(self) -> None:
        self._commit()
        self.committed = True

    @abstractmethod
    def discard(self) -> None: ...

    @abstractmethod
    def _write(self, data: bytes) -> None: ...

    @abstractmethod
    def _commit(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.committed:
            self.discard()


class Blobs:
    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root: str = root.rstrip("/")
        self._local = "file" in self._fs.protocol
        self._fs.makedirs(self._root, exist_ok=True)

    def create(self, blob: str) -> Writer:
        """A blob that is whole and durable after `commit`; until then nobody knows its name."""
        return _LocalWriter(self._path(blob)) if self._local else _RemoteWriter(self._fs, self._path(blob))

    def chunks(self, blob: str) -> Iterator[bytes]:
        with self._fs.open(self._path(blob), "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def part(self, blob: str, offset: int, length: int) -> bytes:
        data: bytes = self._fs.cat_file(self._path(blob), start=offset, end=offset + length)
        return data

    def delete(self, blob: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(blob))

    def _path(self, blob: str) -> str:
        return f"{self._root}/{blob}"


class _LocalWriter(Writer):
    def __init__(self, path: str) -> None:
        self._path = path
        self._partial = f"{path}.part"
        self._file = open(self._partial, "wb")  # noqa: SIM115  closed by commit or discard

    def _write(self, data: bytes) -> None:
        self._file.write(data)

    def _commit(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        os.replace(self._partial, self._path)
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY)
        try:
            os.fsync(folder)  # the name is durable only with its folder
        finally:
            os.close(folder)

    def discard(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._partial)


class _RemoteWriter(Writer):
    """Object stores keep an object when its upload is closed: that is the commit."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file = fs.open(path, "wb")

    def _write(self, data: bytes) -> None:
        self._file.write(data)

    def _commit(self) -> None:
        self._file.close()

    def discard(self) -> None:
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            discard()
        else:
            self._file.close()
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path)
