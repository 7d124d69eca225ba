"""Imports OpenTelemetry spans with the attributes of the GenAI conventions.

Collectors and our gateways write such spans, and Exgentic's data sets have the spans of one session a line.
Calls of a model are grouped by `gen_ai.conversation.id`, or by trace without that attribute. If spans have
messages, a call continues the conversation with which its prompt shares most, at least half of the messages;
otherwise it begins a conversation. Without messages, a prompt that is not shorter than the previous prompt is
taken to begin with the previous prompt and its answer.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path
from statistics import mode
from typing import Any

import orjson

from traces import TraceError
from traces.format import TraceConversation, TraceHeader, TraceTurn, TurnEnding
from traces.importers.source import Importer, document, plain_name, rows

HEADER = TraceHeader(
    source="OpenTelemetry GenAI spans",
    notes="Cached tokens are estimated from messages in common, else from the call before.",
)
CALLS = ("chat", "text_completion", "generate_content", "")
INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
SESSION = ("gen_ai.conversation.id", "session.id")
MODEL = ("gen_ai.request.model", "gen_ai.response.model")
_SCALES = ((1e16, 1e9), (1e14, 1e6), (1e11, 1e3))  # nanoseconds, microseconds, milliseconds; else seconds
MOST_OPEN = 64  # how many conversations of a session a call may continue
ENDINGS = {
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use"), TurnEnding.TOOL_USE),
    **dict.fromkeys(("stop", "end_turn", "completed"), TurnEnding.END_OF_TURN),
}


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Completed call of a model."""

    session: str
    began_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    model: str
    ending: TurnEnding
    messages: tuple[bytes, ...]  # messages of the prompt; empty if the span has none


def read_spans(path: Path) -> Iterator[TraceConversation]:
    calls: dict[str, list[ModelCall]] = defaultdict(list)
    for number, row in _documents(path):
        try:
            for call in filter(None, map(_call, _spans(row))):
                calls[call.session].append(call)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: not spans of a model's calls: {error!r}") from error
    if not calls:
        raise TraceError(f"{path}: no span says how many tokens a model was given ({INPUT[0]})")
    start_s = min(call.began_s for session in calls.values() for call in session)
    for session, found in calls.items():
        name = session or plain_name(path)
        free = (one for number in count(1) if (one := f"{name}/{number}") not in calls)
        for index, chain in enumerate(_chains(sorted(found, key=lambda call: call.began_s))):
            yield _conversation(next(free) if index else name, chain, start_s)


def _documents(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the documents of a file with their line numbers: the whole file, or one per line."""
    try:
        return list(rows(path))
    except TraceError:
        return [(1, document(path))]


def _spans(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in row.get("resourceSpans") or ():
        for scope in resource.get("scopeSpans") or ():
            yield from scope.get("spans") or ()
    spans = row.get("spans") or ()
    for span in orjson.loads(spans) if isinstance(spans, str) else spans:
        yield {"trace_id": row.get("trace_id") or row.get("session_id"), **span}


def _call(span: Mapping[str, Any]) -> ModelCall | None:
    """Return the model call that a span records, or None if it records none or did not complete."""
    attributes = _attributes(span.get("attributes") or {})
    prompt = _first(attributes, INPUT)
    if prompt is None or attributes.get("gen_ai.operation.name", "") not in CALLS or int(prompt) < 1:
        return None
    messages = attributes.get("gen_ai.input.messages")
    if isinstance(messages, str):
        messages = _read(messages)
    began = _seconds(_first(span, ("startTimeUnixNano", "start_time", "start_time_unix_nano")))
    end = _first(span, ("endTimeUnixNano", "end_time", "end_time_unix_nano"))
    if end is None:
        return None
    ended = _seconds(end)
    return ModelCall(
        session=str(_first(attributes, SESSION) or _first(span, ("traceId", "trace_id")) or ""),
        began_s=began,
        ended_s=max(began, ended),
        prompt_tokens=int(prompt),
        output_tokens=int(_first(attributes, OUTPUT) or 0),
        model=str(_first(attributes, MODEL) or ""),
        ending=_ending(attributes),
        messages=tuple(orjson.dumps(one, option=orjson.OPT_SORT_KEYS) for one in _list(messages)),
    )


def _read(text: str) -> Any:
    """Parse JSON; return None if a collector has truncated it."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _attributes(found: Any) -> dict[str, Any]:
    """Return a span's attributes as a dictionary. OTLP encodes them as a list of keys and typed values."""
    if isinstance(found, Mapping):
        return dict(found)
    return {one["key"]: _value(one.get("value") or {}) for one in found}


def _value(typed: Mapping[str, Any]) -> Any:
    found: tuple[str, Any] = next(iter(typed.items()), ("", None))
    kind, value = found
    if kind == "arrayValue":
        return [_value(one) for one in value.get("values") or ()]
    if kind == "kvlistValue":
        return _attributes(value.get("values") or ())
    return int(value) if kind == "intValue" else value


def _seconds(time: Any) -> float:
    if isinstance(time, str) and not time.isdigit():
        moment = datetime.fromisoformat(time)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    since = float(time)
    scale = next((scale for least, scale in _SCALES if since > least), 1.0)
    return since / scale


def _ending(attributes: Mapping[str, Any]) -> TurnEnding:
    reasons = attributes.get("gen_ai.response.finish_reasons")
    if isinstance(reasons, str):
        reasons = _list(_read(reasons)) or [reasons]
    reasons = _list(reasons)
    return ENDINGS.get(str(reasons[0]), TurnEnding.CUT) if reasons else TurnEnding.CUT


@dataclass(slots=True)
class _Chain:
    """Calls that continue one another, with the number of known tokens of each prompt."""

    calls: list[ModelCall]
    cached: list[int]


def _chains(calls: Sequence[ModelCall]) -> list[_Chain]:
    chains: list[_Chain] = []
    # By the first messages, which a call shares at least with the chain that it continues.
    open_: dict[tuple[bytes, ...], deque[_Chain]] = defaultdict(lambda: deque(maxlen=MOST_OPEN))
    for call in calls:
        known = open_[call.messages[:2]]
        shares = [_share(chain, call) for chain in known]
        if not any(shares):
            chains.append(_Chain([call], [0]))
            known.append(chains[-1])
            continue
        share = max(shares)
        chain = known[shares.index(share)]
        chain.calls.append(call)
        chain.cached.append(int(share * call.prompt_tokens))
    return chains


def _share(chain: _Chain, call: ModelCall) -> float:
    """Return how much of a call's prompt is known from the chain's last call and its answer, as a share.

    The share is 0 for a call of another conversation, even if both have the same system prompt.
    """
    last = chain.calls[-1]
    if call.began_s < last.ended_s:
        return 0.0  # the prompt does not contain the last call's answer
    if not call.messages:
        left = last.prompt_tokens + last.output_tokens
        goes_on = call.prompt_tokens >= last.prompt_tokens
        return min(left, call.prompt_tokens) / call.prompt_tokens if goes_on else 0.0
    pairs = zip(last.messages, call.messages, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if common < 2 or common < len(last.messages) / 2:
        return 0.0
    answered = common == len(last.messages) and len(call.messages) > common
    known = sum(map(len, call.messages[: common + answered]))
    return known / sum(map(len, call.messages))


def _conversation(name: str, chain: _Chain, start_s: float) -> TraceConversation:
    turns: list[TraceTurn] = []
    largest = 0
    before: ModelCall | None = None
    for call, known in zip(chain.calls, chain.cached, strict=True):
        cached = min(known, largest, call.prompt_tokens - 1)
        turn = TraceTurn(
            appended_tokens=call.prompt_tokens - cached,
            cached_tokens=cached,
            output_tokens=call.output_tokens,
            wait_s=max(0.0, call.began_s - before.ended_s) if before else 0.0,
            ending=call.ending,
            served_s=call.ended_s - call.began_s,
        )
        largest, before = max(largest, turn.context_tokens), call
        turns.append(turn)
    models = [call.model for call in chain.calls]
    return TraceConversation(name, chain.calls[0].began_s - start_s, tuple(turns), None, mode(models))


SPANS = Importer(
    "otel",
    "OpenTelemetry GenAI spans (OTLP JSON, or one session's spans a line)",
    HEADER,
    ({"resourceSpans"}, {"spans"}),
    read_spans,
)
