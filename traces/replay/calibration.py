"""How many characters make a token for the served tokenizer, and what the chat template adds."""

from dataclasses import dataclass

import aiohttp
import orjson

from traces.errors import ReplayError
from traces.replay import words
from traces.replay.client import ChatClient, Message
from traces.replay.options import ToolStyle

SHORT, LONG = 400, 4_000  # characters
TIMEOUT = aiohttp.ClientTimeout(total=30.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    chars_per_token: float
    opening_tokens: int  # the template's part of a first prompt
    exchange_tokens: int  # what the template adds for an answer and the message after it
    source: str  # "tokenize" or "usage"

    def characters(self, tokens: float) -> int:
        return max(1, round(tokens * self.chars_per_token))

    def tokens(self, characters: int) -> float:
        return characters / self.chars_per_token


def _user(characters: int) -> Message:
    return {"role": "user", "content": words.text("calibration", characters)}


def _exchange(tools: ToolStyle) -> list[Message]:
    """An answer and what comes back, as most turns of an agent have them."""
    if tools is ToolStyle.TEXT:
        return [{"role": "assistant", "content": "yes"}, _user(SHORT)]
    result = {"role": "tool", "tool_call_id": "call_0", "content": words.text("calibration", SHORT)}
    return [{"role": "assistant", "content": "yes", "tool_calls": [tool_call(0)]}, result]


def tool_call(index: int) -> Message:
    call = {"name": "run", "arguments": f'{{"step": {index}}}'}
    return {"id": f"call_{index}", "type": "function", "function": call}


async def calibrate(
    session: aiohttp.ClientSession, url: str, client: ChatClient, tools: ToolStyle
) -> Calibration:
    """By the endpoint's own /tokenize where it has one, else by the prompt tokens that requests report."""
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
