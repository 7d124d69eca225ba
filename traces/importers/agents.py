"""The condensed set of coding-agent conversations: one conversation a line, cached tokens already counted."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.format import Conversation, Ending, Header, TraceError, Turn
from traces.importers.source import Head, Importer, rows

ENDINGS = {"tool_use": Ending.TOOL_USE, "end_turn": Ending.END_OF_TURN, "stop_sequence": Ending.END_OF_TURN}
CLASSES = ("opus", "sonnet", "haiku")
CLOCK_STEP_S = 1.0  # the recordings' timestamps are whole seconds

HEADER = Header(
    source="callanjfox/kv-cache-tester, condensed",
    licence="Apache-2.0",
    attribution="callanjfox/kv-cache-tester contributors",
    notes="Cached tokens are whole 64-token blocks of earlier prompts (the source does not hash answers). "
    "Every conversation arrives at 0: give them arrivals with `conserve trace scale --arrivals`.",
)


def ending(stop: str) -> Ending:
    """An empty stop reason is a stream that nobody saw end."""
    return ENDINGS.get(stop, Ending.CUT)


def model_class(models: Iterator[str]) -> str:
    """The class most of a conversation's requests went to; a few ask a smaller model for a title."""
    counts = Counter(next((name for name in CLASSES if name in model), model) for model in models)
    return counts.most_common(1)[0][0] if counts else ""


def wait(think_s: float, gap_s: float, served_s: float | None) -> float:
    """Tool or human time before a turn, `gap_s` after the turn before began.

    Where the answer before was not timed, the source's think time counts from the last timed answer: it may
    be longer than the whole gap, which then bounds it.
    """
    if served_s is not None and served_s + think_s <= gap_s + CLOCK_STEP_S:
        return think_s
    return max(0.0, min(think_s, gap_s - (served_s or 0.0)))


def _turns(entries: list[dict[str, Any]]) -> Iterator[Turn]:
    before: dict[str, Any] | None = None
    for entry in entries:
        gap = entry["t"] - before["t"] if before else 0.0
        yield Turn(
            appended_tokens=entry["in"] - entry["cached"],
            cached_tokens=entry["cached"],
            output_tokens=entry["out"],
            wait_s=wait(entry["think"], gap, before["api"]) if before else 0.0,
            ending=ending(entry["stop"]),
            served_s=entry["api"],
        )
        before = entry


def read(path: Path) -> Iterator[Conversation]:
    for number, row in rows(path):
        try:
            yield Conversation(
                id=row["id"],
                arrival_s=0.0,
                turns=tuple(_turns(row["turns"])),
                model_class=model_class(turn["model"] for turn in row["turns"]),
            )
        except (KeyError, TypeError) as error:
            raise TraceError(f"{path}:{number}: not a condensed conversation: {error!r}") from error


def recognises(head: Head) -> bool:
    return {"id", "block_size", "turns"} <= head.fields


IMPORTER = Importer("agents", "condensed coding-agent conversations (JSON lines)", HEADER, recognises, read)
