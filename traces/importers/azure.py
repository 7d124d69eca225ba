"""Azure's 2023 LLM inference traces (CSV): arrivals and lengths, every request a conversation of one turn."""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from traces.format import Conversation, Header, TraceError, Turn, open_text
from traces.importers.source import Head, Importer, plain_name

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MICROSECONDS = 26  # characters of a time stamp that datetime reads; the source has one digit more

HEADER = Header(
    source="AzurePublicDataset, LLM inference traces 2023",
    licence="CC-BY-4.0",
    attribution="Microsoft Azure; Patel et al., Splitwise (ISCA 2024)",
    notes="One turn a conversation: the source does not say which requests belong together.",
)


def read(path: Path) -> Iterator[Conversation]:
    start: datetime | None = None
    with open_text(path) as lines:
        table = csv.DictReader(lines)
        if tuple(table.fieldnames or ()) != COLUMNS:
            raise TraceError(f"{path}:1: expected the columns {', '.join(COLUMNS)}")
        for row in table:
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:MICROSECONDS])
                turn = Turn(int(row["ContextTokens"]), 0, int(row["GeneratedTokens"]))
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path}:{table.line_num}: {error}") from error
            start = start or at
            name = f"{plain_name(path)}-{table.line_num - 1:06d}"
            yield Conversation(name, (at - start).total_seconds(), (turn,))


def recognises(head: Head) -> bool:
    return head.first_line.strip() == ",".join(COLUMNS)


IMPORTER = Importer("azure-2023", "Azure 2023 inference traces (CSV)", HEADER, recognises, read)
