"""File format for workloads: conversations as JSON lines. `traces/README.md` describes each field.

A conversation is plain data: when it arrives and what each of its turns asks for. Between turns the file has
*waits* (tool or human time) instead of points in time. A turn cannot start before the previous answer has
ended, and how long that takes depends on the server.
"""

import contextlib
import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TextIO

import msgspec

from traces import NotATrace, TraceError

FORMAT = "conserve-trace/1"


class TurnEnding(StrEnum):
    TOOL_USE = "tool_use"  # the answer calls a tool; nobody reads it
    END_OF_TURN = "end_of_turn"  # the answer speaks to the user
    CUT = "cut"  # the source recorded no stop reason: client gone, error, or length limit


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request and its answer. The prompt has `cached_tokens` known and `appended_tokens` new tokens."""

    appended_tokens: int
    cached_tokens: int  # leading tokens of the prompt that this conversation (or its parent) already had
    output_tokens: int
    wait_s: float = 0.0  # tool or human time between the end of the previous answer and this turn
    ending: TurnEnding = TurnEnding.END_OF_TURN
    served_s: float | None = None  # how long the answer took when the trace was recorded; None: not known

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.appended_tokens

    @property
    def context_tokens(self) -> int:
        """Return how many tokens of KV this turn leaves behind."""
        return self.cached_tokens + self.appended_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class TraceConversation:
    id: str
    arrival_s: float  # arrival of the first turn, since the start of the trace
    turns: tuple[TraceTurn, ...]
    parent: str | None = None  # the conversation whose prefix this one's first turn shares (a sub-agent)
    model_class: str = ""

    @property
    def input_tokens(self) -> int:
        """Return how many tokens a server that forgets nothing has to prefill."""
        return sum(turn.appended_tokens for turn in self.turns)

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def peak_context_tokens(self) -> int:
        return max(turn.context_tokens for turn in self.turns)

    @property
    def wait_s(self) -> float:
        return sum(turn.wait_s for turn in self.turns)

    @property
    def effective_turn(self) -> int:
        """Return the index of the turn that TTFET is about: the first to answer the user, else the last."""
        for index, turn in enumerate(self.turns):
            if turn.ending is TurnEnding.END_OF_TURN:
                return index
        return len(self.turns) - 1


class TraceHeader(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="format", tag=FORMAT):
    """The first line of a file: where the conversations come from."""

    source: str = ""
    licence: str = ""
    attribution: str = ""
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file in memory."""

    header: TraceHeader
    conversations: tuple[TraceConversation, ...] = field(repr=False)


def check(conversation: TraceConversation) -> None:
    """Raise TraceError if a conversation contradicts itself."""
    who = f"conversation {conversation.id!r}"
    if not conversation.id:
        raise TraceError("a conversation has no id")
    if not conversation.turns:
        raise TraceError(f"{who} has no turns")
    if not 0.0 <= conversation.arrival_s < float("inf"):
        raise TraceError(
            f"{who}: arrival {conversation.arrival_s} is not a time since the start of the trace"
        )
    if conversation.parent == conversation.id:
        raise TraceError(f"{who} is its own parent")
    largest = 0
    for number, turn in enumerate(conversation.turns, start=1):
        if min(turn.appended_tokens, turn.cached_tokens, turn.output_tokens) < 0:
            raise TraceError(f"{who}, turn {number}: a token count is negative")
        if turn.prompt_tokens == 0:
            raise TraceError(f"{who}, turn {number}: the prompt is empty")
        if not 0.0 <= turn.wait_s < float("inf"):
            raise TraceError(f"{who}, turn {number}: wait {turn.wait_s} is not a duration")
        if turn.served_s is not None and not 0.0 <= turn.served_s < float("inf"):
            raise TraceError(f"{who}, turn {number}: served {turn.served_s} is not a duration")
        if number == 1 and conversation.parent is None and turn.cached_tokens:
            raise TraceError(
                f"{who}, turn 1: {turn.cached_tokens} cached tokens, but there is no parent that had them"
            )
        if number > 1 and turn.cached_tokens > largest:
            raise TraceError(
                f"{who}, turn {number}: {turn.cached_tokens} cached, but no earlier turn left above {largest}"
            )
        largest = max(largest, turn.context_tokens)


class _TurnRow(msgspec.Struct, omit_defaults=True):
    appended: int
    cached: int
    out: int
    end: TurnEnding
    wait: float | msgspec.UnsetType = msgspec.UNSET  # read as 0 where it is missing, and always written
    served: float | None = None


class _ConversationRow(msgspec.Struct, omit_defaults=True):
    id: str
    arrival: float
    turns: list[_TurnRow]
    parent: str | None = None
    model: str = ""


_DECODER = msgspec.json.Decoder(_ConversationRow)


def to_json(conversation: TraceConversation) -> bytes:
    turns = [
        _TurnRow(
            *(turn.appended_tokens, turn.cached_tokens, turn.output_tokens, turn.ending),
            *(round(turn.wait_s, 6), None if turn.served_s is None else round(turn.served_s, 6)),
        )
        for turn in conversation.turns
    ]
    arrival, parent = round(conversation.arrival_s, 6), conversation.parent
    row = _ConversationRow(conversation.id, arrival, turns, parent, conversation.model_class)
    return msgspec.json.encode(row)


def from_json(line: bytes | str) -> TraceConversation:
    """Parse one line as a checked conversation. TraceError says what is wrong, but not where."""
    try:
        row = _DECODER.decode(line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{error}; traces/README.md describes the format") from error
    turns = (
        TraceTurn(one.appended, one.cached, one.out, one.wait or 0.0, one.end, one.served)
        for one in row.turns
    )
    conversation = TraceConversation(row.id, row.arrival, tuple(turns), row.parent, row.model)
    check(conversation)
    return conversation


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file; its first two bytes tell whether it is compressed with gzip."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if zipped else raw
            with io.TextIOWrapper(stream, encoding="utf-8", errors="strict") as text:
                yield text
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: cannot be read as text: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _header(line: str, path: Path) -> TraceHeader:
    with contextlib.suppress(msgspec.DecodeError):
        if f'"{FORMAT}"' in line:
            return msgspec.json.decode(line, type=TraceHeader)
    raise NotATrace(
        f'{path}:1: not a conserve trace: the first line must be {{"format": "{FORMAT}", ...}};'
        " `conserve trace import` makes one from other formats"
    )


def read(path: Path) -> Iterator[TraceConversation]:
    """Yield the conversations of a file, which are sorted by arrival. Every error names file and line."""
    arrival, seen = 0.0, set[str]()
    with open_text(path) as lines:
        _header(lines.readline(), path)
        for number, line in enumerate(lines, start=2):
            if not line.strip():
                continue
            try:
                conversation = from_json(line)
                if conversation.arrival_s < arrival:
                    raise TraceError(f"conversation {conversation.id!r} arrives before the one above it")
                if conversation.id in seen:
                    raise TraceError(f"conversation id {conversation.id!r} appears twice")
            except TraceError as error:
                raise TraceError(f"{path}:{number}: {error}") from error
            arrival = conversation.arrival_s
            seen.add(conversation.id)
            yield conversation


def load(path: Path) -> Trace:
    with open_text(path) as lines:
        header = _header(lines.readline(), path)
    return Trace(header, tuple(read(path)))


def write(path: Path, conversations: Iterable[TraceConversation], header: TraceHeader) -> int:
    """Check the conversations, write them, and return how many there are. A name in .gz means gzip.

    The same conversations always give the same bytes: gzip's time stamp and file name are left out.
    """
    count, arrival = 0, 0.0
    with path.open("wb") as raw:
        stream = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else raw
        with stream:
            stream.write(msgspec.json.encode(header) + b"\n")
            for conversation in conversations:
                check(conversation)
                if conversation.arrival_s < arrival:
                    raise TraceError(
                        f"conversation {conversation.id!r} arrives before the one above it: sort first"
                    )
                arrival = conversation.arrival_s
                stream.write(to_json(conversation) + b"\n")
                count += 1
    return count
