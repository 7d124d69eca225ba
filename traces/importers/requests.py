"""Imports request traces of Azure and Mooncake.

Azure's trace does not say which requests belong together, so each is a conversation of one turn. Mooncake's
conversations are rebuilt from hashes. A hash names a block *and everything before it*, so two prompts share
exactly the blocks whose hashes they share. A request continues a conversation if its prompt contains every
full block of the conversation's latest prompt. If it shares only earlier blocks, it begins a new conversation
with the older conversation as parent.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from traces import TraceError
from traces.format import TraceConversation, TraceHeader, TraceTurn, open_text
from traces.importers.source import Importer, plain_name, rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MICROSECONDS = 26  # characters of a time stamp that datetime reads; the source has one digit more

AZURE_HEADER = TraceHeader(
    source="AzurePublicDataset, LLM inference traces 2023",
    licence="CC-BY-4.0",
    attribution="Microsoft Azure; Patel et al., Splitwise (ISCA 2024)",
    notes="One turn a conversation: the source does not say which requests belong together.",
)


def read_azure(path: Path) -> Iterator[TraceConversation]:
    start: datetime | None = None
    with open_text(path) as lines:
        table = csv.DictReader(lines)
        if tuple(table.fieldnames or ()) != COLUMNS:
            raise TraceError(f"{path}:1: expected the columns {', '.join(COLUMNS)}")
        for row in table:
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:MICROSECONDS])
                turn = TraceTurn(int(row["ContextTokens"]), 0, int(row["GeneratedTokens"]))
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path}:{table.line_num}: {error}") from error
            start = start or at
            name = f"{plain_name(path)}-{table.line_num - 1:06d}"
            yield TraceConversation(name, (at - start).total_seconds(), (turn,))


AZURE = Importer("azure-2023", "Azure 2023 inference traces (CSV)", AZURE_HEADER, (set(COLUMNS),), read_azure)


ROW = {"timestamp", "input_length", "output_length", "hash_ids"}
BLOCK_TOKENS = 512
# A block that more than this share of the requests have belongs to the service's system prompt.
SYSTEM_SHARE = 0.05

MOONCAKE_HEADER = TraceHeader(
    source="Mooncake conversation trace",
    licence="Apache-2.0",
    attribution="kvcache-ai/Mooncake contributors",
    notes="Conversations are rebuilt from 512-token block hashes. Waits are gaps between requests, answers "
    "included: the source does not say how long these took. Every answer is taken to speak to the user.",
)


@dataclass(slots=True)
class _Open:
    """Conversation that is being rebuilt."""

    id: str
    arrival_s: float
    parent: str | None
    full_blocks: tuple[int, ...] = ()  # full blocks of the latest prompt
    latest_s: float = 0.0
    largest_context: int = 0
    turns: list[TraceTurn] = field(default_factory=list)

    def take(self, row: dict[str, Any], cached: int) -> None:
        at, prompt = row["timestamp"] / 1000.0, row["input_length"]
        turn = TraceTurn(
            appended_tokens=prompt - cached,
            cached_tokens=cached,
            output_tokens=row["output_length"],
            wait_s=at - self.latest_s if self.turns else 0.0,
        )
        self.turns.append(turn)
        self.latest_s = at
        self.full_blocks = tuple(row["hash_ids"][: prompt // BLOCK_TOKENS])
        self.largest_context = max(self.largest_context, turn.context_tokens)


def rebuild(requests: list[dict[str, Any]]) -> list[TraceConversation]:
    system = _system_blocks(requests)
    owners: dict[int, _Open] = {}  # block hash -> the conversation that last had it
    found: list[_Open] = []
    for row in requests:
        blocks, prompt = row["hash_ids"], row["input_length"]
        shared = next((count for count, block in enumerate(blocks) if block not in owners), len(blocks))
        owner = owners[blocks[shared - 1]] if shared and blocks[shared - 1] not in system else None
        cached = min(shared * BLOCK_TOKENS, prompt - 1)  # the last token is always computed
        if owner and len(owner.full_blocks) <= shared and _goes_on(owner, blocks):
            conversation, cached = owner, min(cached, owner.largest_context)
        else:
            name = f"mooncake-{len(found):05d}"
            conversation = _Open(name, row["timestamp"] / 1000.0, owner.id if owner else None)
            cached = cached if owner else 0
            found.append(conversation)
        conversation.take(row, cached)
        owners.update(dict.fromkeys(blocks, conversation))
    return [TraceConversation(c.id, c.arrival_s, tuple(c.turns), c.parent) for c in found]


def _goes_on(conversation: _Open, blocks: list[int]) -> bool:
    mine = conversation.full_blocks
    return bool(mine) and blocks[len(mine) - 1] == mine[-1]


def _system_blocks(requests: list[dict[str, Any]]) -> frozenset[int]:
    counts = Counter(block for row in requests for block in row["hash_ids"])
    often = max(2.0, SYSTEM_SHARE * len(requests))
    return frozenset(block for block, count in counts.items() if count > often)


def read_mooncake(path: Path) -> Iterator[TraceConversation]:
    requests: list[dict[str, Any]] = []
    for number, row in rows(path):
        if not row.keys() >= ROW:
            raise TraceError(f"{path}:{number}: not a Mooncake request: {sorted(row)}")
        if row["input_length"] < 1 or not row["hash_ids"]:
            raise TraceError(f"{path}:{number}: an empty prompt")
        requests.append(row)
    requests.sort(key=lambda row: row["timestamp"])
    yield from rebuild(requests)


MOONCAKE = Importer(
    "mooncake",
    "Mooncake request traces (JSON lines with block hashes)",
    MOONCAKE_HEADER,
    (ROW,),
    read_mooncake,
)
