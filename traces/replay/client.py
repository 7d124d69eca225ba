"""One streamed chat completion with every arrival timed. Raw aiohttp: a client library would time itself."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from traces.errors import ReplayError
from traces.replay.options import Dialect, ReplayOptions

Clock = Callable[[], float]
Message = dict[str, Any]
RETRY_AFTER_S = 1.0  # where a refusal does not say when to come back


class Refused(ReplayError):
    """The endpoint said later: 429 or 503."""

    def __init__(self, status: int, retry_after_s: float, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Answer:
    """What came back, by the client's clock."""

    sent_at: float
    first_at: float = 0.0  # first token of the answer
    last_at: float = 0.0  # last token of the answer
    arrivals: list[float] = field(
        default_factory=list
    )  # of every piece; it is empty while a character is incomplete
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # where the endpoint says so


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

    async def ask(self, messages: list[Message], output_tokens: int, conversation: str = "") -> Answer:
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
        answer = Answer(sent_at=self._clock())
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                async with self._session.post(self._url, data=raw, headers=headers) as response:
                    if response.status != 200:
                        raise await _refusal(response)
                    async for line in response.content:
                        if line.startswith(b"data:") and self._take(line[5:].strip(), answer):
                            break
        except TimeoutError as error:
            raise ReplayError(f"no end of the answer within {self._options.request_timeout_s} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        if not answer.finish_reason:
            raise ReplayError("the stream ended without a finish reason")
        if not answer.arrivals:
            raise ReplayError(f"an empty answer (finish reason {answer.finish_reason})")
        return answer

    def _take(self, data: bytes, answer: Answer) -> bool:
        """One event; True when it was the last."""
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
    """The model the endpoint lists first."""
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
