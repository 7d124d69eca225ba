"""Stores the contents of files in a local folder or behind an fsspec URL, and receives uploaded forms."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import fsspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.errors import BadRequest, PayloadTooLarge

_CHUNK_BYTES = 1 << 20
_FORM_BYTES = 64 << 10  # of an upload's headers and fields, beside the file


class Blobs:
    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root: str = root.rstrip("/")
        self._local = "file" in self._fs.protocol
        self._fs.makedirs(self._root, exist_ok=True)

    def create(self, blob: str) -> "BlobWriter":
        """Return a writer for a new blob, which exists and is durable only after the writer's `commit`."""
        return (_LocalWriter if self._local else BlobWriter)(self._fs, self._path(blob))

    def chunks(self, blob: str) -> Iterator[bytes]:
        with _os_errors(), self._fs.open(self._path(blob), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def part(self, blob: str, offset: int, length: int) -> bytes:
        with _os_errors():
            data: bytes = self._fs.cat_file(self._path(blob), start=offset, end=offset + length)
        return data

    def delete(self, blob: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(blob))

    def _path(self, blob: str) -> str:
        return f"{self._root}/{blob}"


@contextmanager
def _os_errors() -> Iterator[None]:
    """Convert the errors of object stores, which have no common base class, to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class BlobWriter:
    """Writes one blob. Leaving its `with` block discards a blob that is not committed.

    An object store keeps an object once its upload is closed, so `commit` closes the upload.
    """

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file = self._open()
        self.written = 0
        self.committed = False

    def _open(self) -> Any:
        return self._fs.open(self._path, "wb")

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.written += len(data)

    def commit(self) -> None:
        self._file.close()
        self.committed = True

    def discard(self) -> None:
        getattr(self._file, "discard", self._file.close)()
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.committed:
            self.discard()


class _LocalWriter(BlobWriter):
    """Writes a local blob under a temporary name; `commit` gives the blob its final name."""

    def _open(self) -> Any:
        return open(f"{self._path}.part", "wb")

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(f"{self._path}.part", self._path)
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY)
        try:
            os.fsync(folder)  # the name is durable only with its folder
        finally:
            os.close(folder)
        self.committed = True

    def discard(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(f"{self._path}.part")


@dataclass(slots=True)
class UploadForm:
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: no file was in the form


async def receive_form(
    content_type: str, body: AsyncIterator[bytes], writer: BlobWriter, max_file_bytes: int
) -> UploadForm:
    """Read an uploaded form. Its part `file` goes to `writer`, which the caller commits or discards."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest("Upload files as multipart/form-data.", code="invalid_content_type")
    parts = _Parts()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": parts.begin,
            "on_part_data": parts.data,
            "on_part_end": parts.end,
            "on_header_field": parts.header_name,
            "on_header_value": parts.header_value,
            "on_header_end": parts.header_end,
            "on_headers_finished": parts.headers_finished,
            "on_end": parts.all_received,
        },
    )
    received = 0
    try:
        async for chunk in body:
            parser.write(chunk)
            received += len(chunk)
            file_bytes = writer.written + parts.held
            if file_bytes > max_file_bytes:
                raise PayloadTooLarge(f"The file is larger than the {max_file_bytes} bytes allowed.")
            if received - file_bytes > _FORM_BYTES:
                text = f"The upload has more than {_FORM_BYTES} bytes beside its file."
                raise BadRequest(text, code="invalid_multipart")
            if parts.held >= _CHUNK_BYTES:
                await asyncio.to_thread(writer.write, parts.take())
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"The upload is not well-formed: {error}.", code="invalid_multipart") from None
    if not parts.complete:
        raise BadRequest("The upload ended before its last part.", code="invalid_multipart")
    await asyncio.to_thread(writer.write, parts.take())
    return parts.form


class _Parts:
    """Callbacks of the multipart parser that collect the form's fields and the file's bytes."""

    def __init__(self) -> None:
        self.form = UploadForm()
        self.held = 0
        self.complete = False
        self._pieces: list[bytes] = []
        self._name = self._value = b""
        self._disposition = b""
        self._field: str | None = None  # None: the part is the file
        self._text = b""

    def take(self) -> bytes:
        pieces, self._pieces, self.held = self._pieces, [], 0
        return b"".join(pieces)

    def begin(self) -> None:
        self._disposition = self._text = b""

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = options.get(b"name", b"").decode(errors="replace")
        if self._field == "file" and b"filename" in options:
            if self.form.filename is not None:
                raise BadRequest("Upload one file at a time.", param="file", code="invalid_multipart")
            self._field = None
            self.form.filename = options[b"filename"].decode(errors="replace")

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._pieces.append(data[start:end])
            self.held += end - start
        else:
            self._text += data[start:end]

    def end(self) -> None:
        if self._field is not None:
            self.form.fields[self._field] = self._text.decode(errors="replace")

    def all_received(self) -> None:
        self.complete = True
