"""Defines the interface of an importer, and reads files whose format is not known yet."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from traces import TraceError
from traces.format import TraceConversation, TraceHeader, open_text


@dataclass(frozen=True, slots=True)
class Importer:
    """Reader of one file format. It recognises the format by the fields of a file."""

    name: str
    summary: str
    header: TraceHeader
    fields: tuple[set[str], ...]
    read: Callable[[Path], Iterator[TraceConversation]]

    def recognises(self, fields: Iterable[str]) -> bool:
        return any(needed <= set(fields) for needed in self.fields)


def fields_of(path: Path) -> list[str]:
    """Return the fields of the JSON object in a file or in its first line, or the columns of a table."""
    with open_text(path) as lines:
        first = lines.readline()
        if not first.lstrip().startswith("{"):
            return first.strip().split(",")
        return list(_object(first) or _object(first + lines.read()) or ())


def is_one_a_line(path: Path) -> bool:
    """Return whether a file has one JSON object per line, instead of one object over several lines."""
    with open_text(path) as lines:
        return _object(lines.readline()) is not None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def document(path: Path) -> dict[str, Any]:
    """Read a file that is a single JSON object."""
    with open_text(path) as lines:
        found = _object(lines.read())
    if found is None:
        raise TraceError(f"{path}: not a JSON object")
    return found


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of a file, one per line, with their line numbers."""
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            found = _object(line)
            if found is None:
                raise TraceError(f"{path}:{number}: not a JSON object")
            yield number, found


def plain_name(path: Path) -> str:
    """Return the file's name without its endings: trace_0116 for `trace_0116.json.gz`."""
    name = path.name
    for ending in (".gz", ".jsonl", ".json", ".traj", ".csv"):
        name = name.removesuffix(ending)
    return name
