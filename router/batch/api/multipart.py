"""An uploaded form, streamed: the file goes to its blob as it arrives, whatever its size."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.batch.blobs import CHUNK_BYTES, Writer
from router.errors import BadRequest, PayloadTooLarge

_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 32
_MAX_HEADER_BYTES = 4096


@dataclass(slots=True)
class Form:
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: no file was in the form


async def receive_form(
    content_type: str, body: AsyncIterator[bytes], writer: Writer, max_file_bytes: int
) -> Form:
    """The part named `file` goes to `writer`, which the caller commits or discards."""
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
    try:
        async for chunk in body:
            parser.write(chunk)
            if writer.written + parts.held > max_file_bytes:
                raise PayloadTooLarge(f"The file is larger than the {max_file_bytes} bytes allowed.")
            if parts.held >= CHUNK_BYTES:
                await asyncio.to_thread(writer.write, parts.take())
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"The upload is not well-formed: {error}.", code="invalid_multipart") from None
    if not parts.complete:
        raise BadRequest("The upload ended before its last part.", code="invalid_multipart")
    await asyncio.to_thread(writer.write, parts.take())
    return parts.form


class _Parts:
    """The parser's callbacks: they only collect."""

    def __init__(self) -> None:
        self.form = Form()
        self.held = 0
        self.complete = False
        self._pieces: list[bytes] = []
        self._name = b""
        self._value = b""
        self._header_bytes = 0
        self._disposition = b""
        self._field: str | None = None
        self._is_file = False
        self._text = b""

    def take(self) -> bytes:
        pieces, self._pieces, self.held = self._pieces, [], 0
        return b"".join(pieces)

    def begin(self) -> None:
        self._disposition = self._text = b""
        self._field = None
        self._is_file = False
        self._header_bytes = 0

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._bound_header(end - start)

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._bound_header(end - start)

    def header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file" and b"filename" in options:
            if self.form.filename is not None:
                raise BadRequest("Upload one file at a time.", param="file", code="invalid_multipart")
            self._is_file = True
            self.form.filename = options[b"filename"].decode(errors="replace")
        else:
            if len(self.form.fields) >= _MAX_FIELDS:
                raise BadRequest("The form has too many fields.", code="invalid_multipart")
            self._field = name

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            self.held += end - start
            return
        self._text += data[start:end]
        if len(self._text) > _MAX_FIELD_BYTES:
            raise BadRequest(f"The form field '{self._field}' is too long.", code="invalid_multipart")

    def end(self) -> None:
        if self._field is not None:
            self.form.fields[self._field] = self._text.decode(errors="replace")

    def all_received(self) -> None:
        self.complete = True

    def _bound_header(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise BadRequest("A part of the upload has too long headers.", code="invalid_multipart")
