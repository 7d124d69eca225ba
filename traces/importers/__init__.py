"""Imports workloads from other formats. The content of a file decides which importer reads it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from traces import TraceError
from traces.format import Trace, TraceConversation, TraceHeader, check
from traces.importers.agents import CONDENSED, RECORDING, TRAJECTORY
from traces.importers.requests import AZURE, MOONCAKE
from traces.importers.source import Importer, fields_of
from traces.importers.spans import SPANS

IMPORTERS: dict[str, Importer] = {
    importer.name: importer for importer in (CONDENSED, RECORDING, MOONCAKE, AZURE, TRAJECTORY, SPANS)
}


def detect(path: Path) -> Importer:
    fields = fields_of(path)
    for importer in IMPORTERS.values():
        if importer.recognises(fields):
            return importer
    kinds = "; ".join(f"{importer.name}: {importer.summary}" for importer in IMPORTERS.values())
    raise TraceError(f"{path}: none of the importers knows this content ({kinds})")


def import_files(paths: Sequence[Path], kind: str | None = None) -> Trace:
    """Return the conversations of all given files, and of all files in given folders, by arrival."""
    if kind is not None and kind not in IMPORTERS:
        raise TraceError(f"no importer is called {kind!r}; there are {', '.join(IMPORTERS)}")
    files = list(_files(paths))
    if not files:
        raise TraceError("no files to import")
    chosen = [IMPORTERS[kind] if kind else detect(path) for path in files]
    headers = list(dict.fromkeys(importer.header for importer in chosen))
    found = sorted(
        _checked((path, importer) for path, importer in zip(files, chosen, strict=True)),
        key=lambda conversation: (conversation.arrival_s, conversation.id),
    )
    header = TraceHeader(
        source=" + ".join(header.source for header in headers),
        licence=" + ".join(dict.fromkeys(header.licence for header in headers if header.licence)),
        attribution="; ".join(dict.fromkeys(header.attribution for header in headers if header.attribution)),
        notes=" ".join(header.notes for header in headers),
    )
    return Trace(header, tuple(found))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(child for child in path.iterdir() if child.is_file())
        else:
            yield path


def _checked(sources: Iterable[tuple[Path, Importer]]) -> Iterator[TraceConversation]:
    homes: dict[str, Path] = {}
    for path, importer in sources:
        for conversation in importer.read(path):
            try:
                check(conversation)
            except TraceError as error:
                raise TraceError(f"{path}: {error}") from error
            if conversation.id in homes:
                raise TraceError(
                    f"{path}: conversation {conversation.id!r} is also in {homes[conversation.id]}"
                )
            homes[conversation.id] = path
            yield conversation
