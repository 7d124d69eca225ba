"""Imports agents' conversations: condensed files, recordings of kv-cache-tester, trajectories of SWE-agent.

A condensed file has one conversation a line, with cached tokens already counted. Recordings are
kv-cache-tester's own files and AgentX's data sets. They have one recording a file or a line, prompts as ids
of 64-token blocks, and nested sub-agents. Trajectories of SWE-agent and mini-SWE-agent have texts and, in
`info.model_stats`, how many tokens were sent and received in all. Lengths in characters are divided by the
ratio that gives these totals, or without totals by `CHARS_PER_TOKEN`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson

from traces import TraceError
from traces.format import TraceConversation, TraceHeader, TraceTurn, TurnEnding
from traces.importers.source import Importer, document, is_one_a_line, plain_name, rows

ENDINGS = {  # any other stop reason, or none, means that the end of the stream was not recorded
    "tool_use": TurnEnding.TOOL_USE,
    "end_turn": TurnEnding.END_OF_TURN,
    "stop_sequence": TurnEnding.END_OF_TURN,
}
CLASSES = ("opus", "sonnet", "haiku")
CLOCK_STEP_S = 1.0  # the recordings' timestamps are whole seconds

CONDENSED_HEADER = TraceHeader(
    source="callanjfox/kv-cache-tester, condensed",
    licence="Apache-2.0",
    attribution="callanjfox/kv-cache-tester contributors",
    notes="Cached tokens are whole 64-token blocks of earlier prompts (the source does not hash answers). "
    "Every conversation arrives at 0: give them arrivals with `conserve trace scale --arrivals`.",
)


def model_class(models: Iterator[str]) -> str:
    """Return the model class of most requests. A few requests use a smaller model, to make a title."""
    counts = Counter(next((name for name in CLASSES if name in model), model) for model in models)
    return counts.most_common(1)[0][0] if counts else ""


def wait(think_s: float, gap_s: float, served_s: float | None) -> float:
    """Return the tool or human time before a turn that began `gap_s` after the previous turn.

    If the previous answer was not timed, the source's think time counts from the last timed answer. It may
    then be longer than the whole gap, and is limited to it.
    """
    if served_s is not None and served_s + think_s <= gap_s + CLOCK_STEP_S:
        return think_s
    return max(0.0, min(think_s, gap_s - (served_s or 0.0)))


def _turns(entries: list[dict[str, Any]]) -> Iterator[TraceTurn]:
    before: dict[str, Any] | None = None
    for entry in entries:
        gap = entry["t"] - before["t"] if before else 0.0
        yield TraceTurn(
            appended_tokens=entry["in"] - entry["cached"],
            cached_tokens=entry["cached"],
            output_tokens=entry["out"],
            wait_s=wait(entry["think"], gap, before["api"]) if before else 0.0,
            ending=ENDINGS.get(entry["stop"], TurnEnding.CUT),
            served_s=entry["api"],
        )
        before = entry


def read_condensed(path: Path) -> Iterator[TraceConversation]:
    for number, row in rows(path):
        try:
            yield TraceConversation(
                id=row["id"],
                arrival_s=0.0,
                turns=tuple(_turns(row["turns"])),
                model_class=model_class(turn["model"] for turn in row["turns"]),
            )
        except (KeyError, TypeError) as error:
            raise TraceError(f"{path}:{number}: not a condensed conversation: {error!r}") from error


CONDENSED = Importer(
    "agents",
    "condensed coding-agent conversations (JSON lines)",
    CONDENSED_HEADER,
    ({"id", "block_size", "turns"},),
    read_condensed,
)


RECORDING_HEADER = TraceHeader(
    source="callanjfox/kv-cache-tester",
    licence="Apache-2.0",
    attribution="callanjfox/kv-cache-tester contributors",
    notes="Cached tokens are whole blocks of earlier prompts of the conversation or its parents. "
    "Every recording arrives at 0, its sub-agents when they were started.",
)


def _leading_known(blocks: list[int], known: set[int]) -> int:
    return next((count for count, block in enumerate(blocks) if block not in known), len(blocks))


def _condensed(
    requests: list[dict[str, Any]], block_tokens: int, known: set[int]
) -> Iterator[dict[str, Any]]:
    """Yield requests in the form of condensed files, and add their blocks to `known`."""
    for request, before, following in zip(requests, [None, *requests], [*requests[1:], None], strict=False):
        blocks = request.get("hash_ids") or []
        cached = _leading_known(blocks, known) * block_tokens
        known.update(blocks)
        gap = request["t"] - before["t"] if before else 0.0
        # If no stop reason was recorded, a tool result in the next request shows that a tool was called.
        answered = following is not None and "tool_result" in following.get("input_types", ())
        yield {
            "t": request["t"],
            "in": request["in"],
            "cached": min(cached, request["in"]),
            "out": request["out"],
            "think": gap if request.get("think_time") is None else request["think_time"],
            "api": request.get("api_time"),
            "stop": request.get("stop") or ("tool_use" if answered else ""),
        }


def _recorded(
    name: str,
    parent: str | None,
    start_s: float,
    entries: list[dict[str, Any]],
    block_tokens: int,
    known: set[int],
    absolute: bool,
) -> Iterator[TraceConversation]:
    """Yield a recorded conversation, then its sub-agents. With `absolute`, all times are on one clock."""
    requests = [entry for entry in entries if entry["type"] != "subagent"]
    inherited = frozenset(known)
    if requests:
        yield TraceConversation(
            id=name,
            arrival_s=start_s + requests[0]["t"],
            turns=tuple(_turns(list(_condensed(requests, block_tokens, known)))),
            parent=parent,
            model_class=model_class(request["model"] for request in requests),
        )
    agents = [entry for entry in entries if entry["type"] == "subagent"]
    for number, agent in enumerate(agents, start=1):
        had = (r.get("hash_ids") or [] for r in requests if r["t"] <= agent["t"])
        above, start = name if requests else parent, start_s + (0.0 if absolute else agent["t"])
        inner = agent.get("requests") or []
        yield from _recorded(
            f"{name}/{number}", above, start, inner, block_tokens, set(inherited).union(*had), absolute
        )


def _delays(entries: list[dict[str, Any]]) -> Iterator[float]:
    """Yield each sub-agent entry's time minus its sub-agent's start, as if both were on one clock."""
    for agent in entries:
        if agent["type"] == "subagent":
            inner = agent.get("requests") or []
            yield from (entry["t"] - agent["t"] for entry in inner)
            yield from _delays(inner)


def read_recording(path: Path) -> Iterator[TraceConversation]:
    for where, recording in _recordings(path):
        try:
            name, entries, block_tokens = recording["id"], recording["requests"], recording["block_size"]
            # kv-cache-tester's clock begins anew with each sub-agent; that of AgentX's data sets goes on.
            absolute = min(_delays(entries), default=0.0) > -CLOCK_STEP_S
            yield from _recorded(name, None, 0.0, entries, block_tokens, set(), absolute)
        except (KeyError, TypeError) as error:
            raise TraceError(f"{where}: not a recording of kv-cache-tester: {error!r}") from error


def _recordings(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if is_one_a_line(path):
        yield from ((f"{path}:{number}", row) for number, row in rows(path))
    else:
        yield str(path), document(path)


RECORDING = Importer(
    "kv-cache-tester",
    "kv-cache-tester recordings and AgentX data sets (JSON, one a file or a line)",
    RECORDING_HEADER,
    (
        {"block_size", "requests", "hash_id_scope"},
        {"block_size", "requests", "tool_tokens"},
    ),
    read_recording,
)


CHARS_PER_TOKEN = 3.6  # English and code under current byte-pair vocabularies: 3 to 4
PLAUSIBLE = (1.5, 12.0)  # outside, the totals count something else, such as retries

TRAJECTORY_HEADER = TraceHeader(
    source="SWE-agent trajectories",
    licence="",
    attribution="",
    notes="Token counts are estimated from characters and the file's totals. Every run arrives at 0.",
)


@dataclass(frozen=True, slots=True)
class _Call:
    """Call of the model: the texts of its prompt and answer, and the time of the tool after it."""

    prompt: tuple[str, ...]  # messages
    answer: str
    tool_s: float  # how long the action that the answer asked for took


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content)
    calls = message.get("tool_calls")
    return content + (orjson.dumps(calls).decode() if calls else "")


def _from_queries(steps: Sequence[dict[str, Any]]) -> Iterator[_Call]:
    """Yield the model calls of SWE-agent from 1.1 on, where each step records the model's exact input."""
    for step in steps:
        prompt = tuple(_text(message) for message in step["query"])
        yield _Call(prompt, step.get("response") or "", float(step.get("execution_time") or 0.0))


def _from_messages(messages: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> Iterator[_Call]:
    """Yield the model calls of older SWE-agents and of mini-SWE-agent, one for each assistant message.

    The prompt of a call is all messages before the answer.
    """
    shown: list[str] = []
    times = [float(step.get("execution_time") or 0.0) for step in steps]
    for message in messages:
        if message.get("role") == "assistant" and not message.get("is_demo"):
            yield _Call(tuple(shown), _text(message), times.pop(0) if times else 0.0)
        shown.append(_text(message))


def _calls(run: dict[str, Any]) -> list[_Call]:
    steps = run.get("trajectory") or []
    if steps and all("query" in step for step in steps):
        return list(_from_queries(steps))
    return list(_from_messages(run.get("history") or run.get("messages") or [], steps))


def _ratio(characters: int, tokens: float | None) -> float:
    if not tokens or not PLAUSIBLE[0] <= characters / tokens <= PLAUSIBLE[1]:
        return CHARS_PER_TOKEN
    return characters / tokens


def _common(before: Sequence[str], now: Sequence[str]) -> int:
    """Return how many characters two prompts share in whole messages at their beginning."""
    pairs = zip(before, now, strict=False)
    return sum(len(new) for _, new in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _trajectory_turns(calls: Sequence[_Call], stats: dict[str, Any], finished: bool) -> Iterator[TraceTurn]:
    sent = _ratio(sum(len(text) for call in calls for text in call.prompt), stats.get("tokens_sent"))
    received = _ratio(sum(len(call.answer) for call in calls), stats.get("tokens_received"))
    known: tuple[str, ...] = ()
    largest = 0
    for index, call in enumerate(calls):
        prompt = max(1, round(sum(map(len, call.prompt)) / sent))
        cached = min(int(_common(known, call.prompt) / sent), prompt - 1, largest)
        last = TurnEnding.END_OF_TURN if finished else TurnEnding.CUT
        turn = TraceTurn(
            appended_tokens=prompt - cached,
            cached_tokens=cached,
            output_tokens=max(1, round(len(call.answer) / received)),
            wait_s=calls[index - 1].tool_s if index else 0.0,
            ending=last if index == len(calls) - 1 else TurnEnding.TOOL_USE,
        )
        known = (*call.prompt, call.answer)
        largest = max(largest, turn.context_tokens)
        yield turn


def read_trajectory(path: Path) -> Iterator[TraceConversation]:
    run = document(path)
    try:
        calls, info = _calls(run), run.get("info") or {}
        if not calls:
            raise TraceError(f"{path}: no answer of a model in it")
        finished = str(info.get("exit_status") or "").lower().startswith("submitted")
        turns = tuple(_trajectory_turns(calls, info.get("model_stats") or {}, finished))
    except (AttributeError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a SWE-agent trajectory: {error!r}") from error
    yield TraceConversation(plain_name(path), 0.0, turns)


TRAJECTORY = Importer(
    "swe-agent",
    "SWE-agent and mini-SWE-agent trajectories (.traj)",
    TRAJECTORY_HEADER,
    ({"info", "trajectory"}, {"info", "history"}, {"info", "messages"}),
    read_trajectory,
)
