"""SWE-agent and mini-SWE-agent trajectories: texts, turned into token counts.

The files hold texts and, in `info.model_stats`, how many tokens were sent and received in all. Lengths in
characters are divided by the ratio that makes these totals come out; without them, by `CHARS_PER_TOKEN`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from traces.format import Conversation, Ending, Header, TraceError, Turn
from traces.importers.source import Head, Importer, document, plain_name

CHARS_PER_TOKEN = 3.6  # English and code under current byte-pair vocabularies: 3 to 4
PLAUSIBLE = (1.5, 12.0)  # a ratio outside means the totals are of something else (retries, another tokenizer)

HEADER = Header(
    source="SWE-agent trajectories",
    licence="",
    attribution="",
    notes="Token counts are estimated from characters and the file's totals. Every run arrives at 0.",
)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the model, in characters."""

    prompt: tuple[str, ...]  # messages
    answer: str
    tool_s: float  # time its action took


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content)
    calls = message.get("tool_calls")
    return content + (orjson.dumps(calls).decode() if calls else "")


def _from_queries(steps: Sequence[dict[str, Any]]) -> Iterator[_Call]:
    """SWE-agent from 1.1 on: each step says exactly what the model was shown."""
    for step in steps:
        prompt = tuple(_text(message) for message in step["query"])
        yield _Call(prompt, step.get("response") or "", float(step.get("execution_time") or 0.0))


def _from_messages(messages: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> Iterator[_Call]:
    """Older files and mini-SWE-agent: every assistant message answers all that stands before it."""
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
    """Characters of the whole leading messages that two prompts share."""
    same = 0
    for old, new in zip(before, now, strict=False):
        if old != new:
            break
        same += len(new)
    return same


def _turns(calls: Sequence[_Call], stats: dict[str, Any], finished: bool) -> Iterator[Turn]:
    sent = _ratio(sum(len(text) for call in calls for text in call.prompt), stats.get("tokens_sent"))
    received = _ratio(sum(len(call.answer) for call in calls), stats.get("tokens_received"))
    known: tuple[str, ...] = ()
    largest = 0
    for index, call in enumerate(calls):
        prompt = max(1, round(sum(map(len, call.prompt)) / sent))
        cached = min(int(_common(known, call.prompt) / sent), prompt - 1, largest)
        last = index == len(calls) - 1
        turn = Turn(
            appended_tokens=prompt - cached,
            cached_tokens=cached,
            output_tokens=max(1, round(len(call.answer) / received)),
            wait_s=calls[index - 1].tool_s if index else 0.0,
            ending=Ending.TOOL_USE if not last else Ending.END_OF_TURN if finished else Ending.CUT,
        )
        known = (*call.prompt, call.answer)
        largest = max(largest, turn.context_tokens)
        yield turn


def read(path: Path) -> Iterator[Conversation]:
    run = document(path)
    try:
        calls, info = _calls(run), run.get("info") or {}
        if not calls:
            raise TraceError(f"{path}: no answer of a model in it")
        finished = str(info.get("exit_status") or "").lower().startswith("submitted")
        turns = tuple(_turns(calls, info.get("model_stats") or {}, finished))
    except (AttributeError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a SWE-agent trajectory: {error!r}") from error
    yield Conversation(plain_name(path), 0.0, turns)


def recognises(head: Head) -> bool:
    return "info" in head.fields and bool({"trajectory", "history", "messages"} & head.fields)


IMPORTER = Importer(
    "swe-agent", "SWE-agent and mini-SWE-agent trajectories (.traj)", HEADER, recognises, read
)
