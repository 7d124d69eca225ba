"""kv-cache-tester's own files: one recording a file, prompts as ids of 64-token blocks, sub-agents nested."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.format import Conversation, Ending, Header, TraceError, Turn
from traces.importers.agents import ending, model_class, wait
from traces.importers.source import Head, Importer, document

HEADER = Header(
    source="callanjfox/kv-cache-tester",
    licence="Apache-2.0",
    attribution="callanjfox/kv-cache-tester contributors",
    notes="Cached tokens are whole blocks of earlier prompts of the conversation or its parents. "
    "Every recording arrives at 0, its sub-agents when they were started.",
)


def _leading_known(blocks: list[int], known: set[int]) -> int:
    for count, block in enumerate(blocks):
        if block not in known:
            return count
    return len(blocks)


def _ending(request: dict[str, Any], following: dict[str, Any] | None) -> Ending:
    """The stop reason; where none was recorded, a tool result that comes next shows what it was."""
    if not request["stop"] and following and "tool_result" in following.get("input_types", ()):
        return Ending.TOOL_USE
    return ending(request["stop"])


class _Recording:
    """One conversation of a file and, after it, its sub-agents."""

    def __init__(self, block_tokens: int, known: set[int]) -> None:
        self._block_tokens = block_tokens
        self._known = known

    def conversations(
        self, name: str, parent: str | None, start_s: float, entries: list[dict[str, Any]]
    ) -> Iterator[Conversation]:
        requests = [entry for entry in entries if entry["type"] != "subagent"]
        inherited = frozenset(self._known)
        if requests:
            yield Conversation(
                id=name,
                arrival_s=start_s + requests[0]["t"],
                turns=tuple(self._turns(requests)),
                parent=parent,
                model_class=model_class(request["model"] for request in requests),
            )
        agents = [entry for entry in entries if entry["type"] == "subagent"]
        for number, agent in enumerate(agents, start=1):
            shared = set(inherited).union(*(r["hash_ids"] for r in requests if r["t"] <= agent["t"]))
            yield from _Recording(self._block_tokens, shared).conversations(
                f"{name}/{number}",
                name if requests else parent,
                start_s + agent["t"],
                agent.get("requests", []),
            )

    def _turns(self, requests: list[dict[str, Any]]) -> Iterator[Turn]:
        for index, request in enumerate(requests):
            before = requests[index - 1] if index else None
            cached = _leading_known(request["hash_ids"], self._known) * self._block_tokens
            cached = min(cached, request["in"])
            self._known.update(request["hash_ids"])
            yield Turn(
                appended_tokens=request["in"] - cached,
                cached_tokens=cached,
                output_tokens=request["out"],
                wait_s=_wait(request, before) if before else 0.0,
                ending=_ending(request, requests[index + 1] if index + 1 < len(requests) else None),
                served_s=request.get("api_time"),
            )


def _wait(request: dict[str, Any], before: dict[str, Any]) -> float:
    gap = request["t"] - before["t"]
    return wait(request.get("think_time", gap), gap, before.get("api_time"))


def read(path: Path) -> Iterator[Conversation]:
    recording = document(path)
    try:
        yield from _Recording(recording["block_size"], set()).conversations(
            recording["id"], None, 0.0, recording["requests"]
        )
    except (KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a recording of kv-cache-tester: {error!r}") from error


def recognises(head: Head) -> bool:
    return {"block_size", "requests", "hash_id_scope"} <= head.fields or (
        {"block_size", "requests", "tool_tokens"} <= head.fields
    )


IMPORTER = Importer(
    "kv-cache-tester", "kv-cache-tester recordings (one JSON file each)", HEADER, recognises, read
)
