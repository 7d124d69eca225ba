"""Client of an OpenAI endpoint: streamed chat completions with every arrival timed, and token counts.

It uses aiohttp directly, because the time that a client library takes would be measured, too.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

import aiohttp
import orjson

from traces import ReplayError


class Dialect(StrEnum):
    VLLM = "vllm"  # asks for exactly as many tokens as the trace has (`ignore_eos`, `min_tokens`)
    OPENAI = "openai"  # standard fields only: an answer may end early


class ToolStyle(StrEnum):
    CALLS = "calls"  # assistant tool calls and tool results
    TEXT = "text"  # user messages, for chat templates without tools


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    url: str  # up to and without /v1
    model: str = ""  # empty: the first model that the endpoint lists
    api_key: str = ""
    dialect: Dialect = Dialect.VLLM
    tools: ToolStyle = ToolStyle.CALLS
    max_conversations: int = 256  # most in flight; further conversations start late, which is counted
    time_limit_s: float = 600.0  # limit of the replay; conversations not done by then count as unfinished
    request_timeout_s: float = 300.0
    retries: int = 8  # retries of a turn that was refused with 429 or 503
    probes: int = 3  # conversations played alone first, to know the unloaded latency; 0: no SLO
    slo_factor: float = 5.0
    conversation_header: str = ""  # send the conversation's id in this header; agents do not
    metrics_urls: tuple[str, ...] = ()  # metrics pages to read besides the endpoint's, such as the engines'
    salt: str = "0"  # another salt gives other texts, which no cache has from an earlier run


VOCABULARY = (
    "about after again air all along also an and another any are around as at away back be because been "
    "before below between both but by call can change come could day did do does down each end even every "
    "find first for from get give go good great had has have he help her here him his home house how if in "
    "into is it just keep kind know large last learn left life like line little live long look made make "
    "man many may me men might more most move much must my name need never new next no not now number of "
    "off old on one only or other our out over own page part people place plant point put read right said "
    "same saw say school see sentence set she should show small so some something sound still stop story "
    "study such take tell than that the their them then there these they thing think this those three "
    "through time to together too tree try turn two under until up us use very want was water way we well"
)
WORDS = tuple(VOCABULARY.split())
AVERAGE = sum(len(word) + 1 for word in WORDS) / len(WORDS)


def text(stream: str, characters: int) -> str:
    if characters <= 0:
        return ""
    random = Random(stream)
    parts: list[str] = []
    length = -1
    while length < characters:
        chosen = random.choices(WORDS, k=int((characters - length) / AVERAGE) + 8)
        parts.extend(chosen)
        length += sum(map(len, chosen)) + len(chosen)
    return " ".join(parts)[:characters]


Clock = Callable[[], float]
Message = dict[str, Any]
RETRY_AFTER_S = 1.0  # used if a refusal does not say when to come back


class Refused(ReplayError):
    """Refusal with 429 or 503, which asks the client to come back later."""

    def __init__(self, status: int, retry_after_s: float, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class TimedAnswer:
    """A streamed answer, with its times by the client's clock."""

    first_at: float = 0.0  # first token of the answer
    last_at: float = 0.0  # last token of the answer
    # Time of every piece, of empty ones too: a piece is empty while a character is incomplete.
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # None if the endpoint does not report it


class ChatClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        options: ReplayOptions,
        model: str,
        clock: Clock = time.monotonic,
    ) -> None:
        self._session = session
        self._options = options
        self._clock = clock
        self.model = model
        self._url = f"{options.url.rstrip('/')}/v1/chat/completions"

    async def ask(self, messages: list[Message], output_tokens: int, conversation: str = "") -> TimedAnswer:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max(1, output_tokens),
            "temperature": 0.0,
        }
        if self._options.dialect is Dialect.VLLM:
            body |= {"ignore_eos": True, "min_tokens": max(1, output_tokens)}
        headers = {"Content-Type": "application/json"}
        if self._options.conversation_header and conversation:
            headers[self._options.conversation_header] = conversation
        raw = orjson.dumps(body)
        answer = TimedAnswer()
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                async with self._session.post(self._url, data=raw, headers=headers) as response:
                    if response.status != 200:
                        raise await _refusal(response)
                    async for line in response.content:
                        if line.startswith(b"data:") and self._take(line[5:].strip(), answer):
                            break
        except TimeoutError as error:
            raise ReplayError(f"no complete answer within {self._options.request_timeout_s} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        if not answer.finish_reason:
            raise ReplayError("the stream ended without a finish reason")
        if not answer.arrivals:
            raise ReplayError(f"an empty answer (finish reason {answer.finish_reason})")
        return answer

    def _take(self, data: bytes, answer: TimedAnswer) -> bool:
        """Add an event to the answer; return whether it was the last event."""
        if data == b"[DONE]":
            return True
        event = orjson.loads(data)
        if "error" in event:
            raise ReplayError(f"error in the stream: {event['error']}")
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if piece or delta.get("tool_calls") or ("role" not in delta and delta.get("content") == ""):
                now = self._clock()
                answer.first_at = answer.first_at or now
                answer.last_at = now
                answer.arrivals.append(now)
                answer.text += delta.get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if usage := event.get("usage"):
            answer.prompt_tokens = usage.get("prompt_tokens")
            answer.completion_tokens = usage.get("completion_tokens")
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return False


async def _refusal(response: aiohttp.ClientResponse) -> ReplayError:
    text = (await response.text())[:300]
    if response.status in (429, 503):
        return Refused(response.status, _retry_after(response.headers.get("Retry-After", "")), text)
    return ReplayError(f"HTTP {response.status}: {text}")


def _retry_after(value: str) -> float:
    try:
        return max(0.0, float(value))
    except ValueError:
        return RETRY_AFTER_S


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the model that the endpoint lists first."""
    address = f"{url.rstrip('/')}/v1/models"
    try:
        async with session.get(address, timeout=aiohttp.ClientTimeout(total=15.0)) as response:
            listed = orjson.loads(await response.read())
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        reason = error.strerror if isinstance(error, aiohttp.ClientOSError) else repr(error)
        raise ReplayError(
            f"{address} lists no model ({reason}): is the endpoint up? If it is, name a model with --model"
        ) from error


SHORT, LONG = 400, 4_000  # characters
TIMEOUT = aiohttp.ClientTimeout(total=30.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Characters per token of the endpoint's tokenizer, and tokens that its chat template adds."""

    chars_per_token: float
    opening_tokens: int  # tokens that the template adds to a first prompt
    exchange_tokens: int  # tokens that the template adds for an answer and the message after it
    source: str  # "tokenize" or "usage"

    def characters(self, tokens: float) -> int:
        return max(1, round(tokens * self.chars_per_token))


def _user(characters: int) -> Message:
    return {"role": "user", "content": text("calibration", characters)}


def _exchange(tools: ToolStyle) -> list[Message]:
    """Return an answer and the message that follows it, as in most turns of an agent."""
    if tools is ToolStyle.TEXT:
        return [{"role": "assistant", "content": "yes"}, _user(SHORT)]
    result = {"role": "tool", "tool_call_id": "call_0", "content": text("calibration", SHORT)}
    return [{"role": "assistant", "content": "yes", "tool_calls": [tool_call(0)]}, result]


def tool_call(index: int) -> Message:
    call = {"name": "run", "arguments": f'{{"step": {index}}}'}
    return {"id": f"call_{index}", "type": "function", "function": call}


async def calibrate(
    session: aiohttp.ClientSession, url: str, client: ChatClient, tools: ToolStyle
) -> Calibration:
    """Measure the calibration with the endpoint's /tokenize, or else with the usage of short requests."""
    short, long = [_user(SHORT)], [_user(LONG)]
    pair = [_user(SHORT), *_exchange(tools)]
    counted = [await _tokenize(session, url, client.model, messages) for messages in (short, long, pair)]
    source = "tokenize"
    if None in counted:
        counted = [await _usage(client, messages) for messages in (short, long, pair)]
        source = "usage"
    low, high, exchange = (float(count or 0) for count in counted)
    if high <= low:
        raise ReplayError(
            f"{LONG} characters count {high} tokens and {SHORT} count {low}: cannot size prompts"
        )
    ratio = (LONG - SHORT) / (high - low)
    opening = max(0, round(low - SHORT / ratio))
    added = max(0, round(exchange - low - (SHORT + len("yes")) / ratio))
    return Calibration(ratio, opening, added, source)


async def _tokenize(
    session: aiohttp.ClientSession, url: str, model: str, messages: list[Message]
) -> int | None:
    body = orjson.dumps({"model": model, "messages": messages})
    headers = {"Content-Type": "application/json"}
    address = f"{url.rstrip('/')}/tokenize"
    try:
        async with session.post(address, data=body, headers=headers, timeout=TIMEOUT) as response:
            if response.status != 200:
                return None
            return int(orjson.loads(await response.read())["count"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        return None


async def _usage(client: ChatClient, messages: list[Message]) -> int:
    answer = await client.ask(messages, 1)
    if answer.prompt_tokens is None:
        raise ReplayError("the endpoint has neither /tokenize nor usage in its answers: cannot size prompts")
    return answer.prompt_tokens
