"""Exact tokens: builds a prompt from the tokens of earlier turns, as far as their text matches the prompt's.

An answer comes back as text within the next turn's prompt. This text may be tokenised differently from how it
was generated, and the KV is useless from the first difference on. So the server remembers the tokens of each
conversation's last turn. When vLLM has rendered the next prompt, the longest beginning of these tokens with
the same text replaces the beginning of the prompt. Text that changed (edits, stripped reasoning, tool calls
rendered anew) is tokenised as usual, and so is a conversation's first prompt on another engine.

A conversation that moves to another engine (`moves` in a request's `kv_transfer_params`) keeps its exact
tokens: the former engine builds the prompt, and the new engine gets its tokens with the request.
"""

import asyncio
import logging
from array import array
from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import Counter

log = logging.getLogger("conserve.workers.exact_tokens")

MOST_BYTES = 128 << 20  # limit for all remembered turns; the least recently used are forgotten
MOST_READ = 65_536  # most tokens of a prompt that are compared as text, which takes about 0.1 s
TURN_BYTES = 1_024  # memory of a remembered turn without its tokens
VOCABULARY_S = 5.0  # how long a turn waits for the vocabulary
_COMPARED_AT_ONCE = 4_096  # tokens

KEPT = Counter(
    "conserve_prefix_exact_tokens_total",
    "Prompt tokens that were taken from earlier answers as they were generated, where the answer's "
    "text is tokenised differently. Their cached KV is used.",
)
FALLBACKS = Counter(
    "conserve_prefix_exact_fallbacks_total",
    "Prompts whose earlier answers were tokenised again from text, by cause: transferred (a prefiller "
    "computes the prompt), too_long (for the model's context), no_vocabulary (the text of this "
    "tokenizer's tokens is not known).",
    ["cause"],
)
for _cause in ("transferred", "too_long", "no_vocabulary"):
    FALLBACKS.labels(_cause)

Generate = Callable[..., AsyncGenerator[Any, None]]
Tokens: TypeAlias = "array[int]"


class Vocabulary:
    """Table of each token's bytes. A special token has None, because its text may not be compared."""

    def __init__(self, token_bytes: Sequence[bytes | None]) -> None:
        self._bytes = token_bytes

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        from xgrammar import TokenizerInfo

        token_bytes: list[bytes | None] = list(TokenizerInfo.from_huggingface(tokenizer).decoded_vocab)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        for special in {*tokenizer.all_special_ids, *(token for token, one in added.items() if one.special)}:
            if special < len(token_bytes):
                token_bytes[special] = None
        return cls(token_bytes)

    def bytes_of(self, token: int) -> bytes | None:
        return self._bytes[token] if 0 <= token < len(self._bytes) else None

    def begins_within_character(self, token: int) -> bool:
        text = self.bytes_of(token)
        return bool(text) and text[0] & 0xC0 == 0x80  # type: ignore[index]


class Place(NamedTuple):
    """Position in the known and in the rendered tokens up to which both have the same text."""

    known: int
    rendered: int


class _Reader:
    """Reader of tokens as text, as clients see it: bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, tokens: Sequence[int], at: int, vocabulary: Vocabulary) -> None:
        self.at = at
        self.text = ""
        self._tokens, self._vocabulary = tokens, vocabulary
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        if self.at >= len(self._tokens):
            return False
        token = self._tokens[self.at]
        self.at += 1
        text = self._vocabulary.bytes_of(token)
        if text is None:  # put a special token between surrogates, which no text contains
            self.text += self._decoder.decode(b"", final=True) + f"\ud800{token}\udfff"
            self._decoder.reset()
        else:
            self.text += self._decoder.decode(text)
        return True

    @property
    def between_characters(self) -> bool:
        return not self.text and not self._decoder.getstate()[0]


def agreeing(known: Sequence[int], rendered: Sequence[int], since: Place, vocabulary: Vocabulary) -> Place:
    """Return the last place before the texts of `known` and `rendered` differ, searching from `since`."""
    place = since
    ours, theirs = _Reader(known, since.known, vocabulary), _Reader(rendered, since.rendered, vocabulary)
    for _ in range(MOST_READ):
        behind = ours if len(ours.text) <= len(theirs.text) else theirs
        if not behind.read():
            break
        both = min(len(ours.text), len(theirs.text))
        if ours.text[:both] != theirs.text[:both]:
            break
        ours.text, theirs.text = ours.text[both:], theirs.text[both:]
        if ours.between_characters and theirs.between_characters:
            place = Place(ours.at, theirs.at)
    return place


def common(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix of two token sequences."""
    same, end = 0, min(len(one), len(other))
    step = _COMPARED_AT_ONCE
    while same < end and one[same : same + step] == other[same : same + step]:
        same = min(same + step, end)
    while same < end and one[same] == other[same]:
        same += 1
    return same


@dataclass(frozen=True, slots=True)
class RememberedTurn:
    """Tokens of a conversation's last turn."""

    rendered: Tokens  # the prompt as its text is tokenised
    tokens: Tokens  # the prompt as it was computed, and the answer
    since: Place  # from here on, `rendered` and `tokens` have the same prompt tokens

    def equal(self, rendered: Tokens) -> Place:
        """Return the last place before a new prompt's tokens differ from this turn's."""
        same = common(self.rendered, rendered)
        shift = self.since.known - self.since.rendered
        if same < self.since.rendered:
            same = shift = 0
        same += common(self.tokens[same + shift :], rendered[same:])
        return Place(same + shift, same)

    def continued(self, rendered: Tokens, equal: Place, vocabulary: Vocabulary) -> Place:
        """Return the last place before a new prompt's text differs from this turn's.

        The tokens up to `equal` are known to be the same.
        """
        shift = equal.known - equal.rendered
        same = equal.rendered
        floor = self.since.rendered if same >= self.since.rendered else 0
        while same > floor and self._within_character(same, shift, rendered, vocabulary):
            same -= 1
        return max(equal, agreeing(self.tokens, rendered, Place(same + shift, same), vocabulary))

    def _within_character(self, at: int, shift: int, rendered: Tokens, vocabulary: Vocabulary) -> bool:
        following = (*self.tokens[at + shift : at + shift + 1], *rendered[at : at + 1])
        return any(map(vocabulary.begins_within_character, following))

    @property
    def bytes(self) -> int:
        return TURN_BYTES + self.rendered.itemsize * (len(self.rendered) + len(self.tokens))


class RememberedTurns:
    """Last turns of the most recently used conversations, within a memory limit."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._turns: OrderedDict[str, RememberedTurn] = OrderedDict()
        self._most, self._held = most_bytes, 0

    def get(self, conversation: str) -> RememberedTurn | None:
        return self._turns.get(conversation)

    def put(self, conversation: str, turn: RememberedTurn) -> None:
        self._drop(self._turns.pop(conversation, None))
        self._turns[conversation] = turn
        self._held += turn.bytes
        while self._held > self._most:
            self._drop(self._turns.popitem(last=False)[1])

    def _drop(self, turn: RememberedTurn | None) -> None:
        self._held -= turn.bytes if turn is not None else 0


class ExactTokens:
    """Wrapper of `AsyncLLM.generate` that builds prompts from exact tokens."""

    def __init__(self, vocabulary_of: Callable[[Any], Vocabulary | None] | None = None) -> None:
        self._conversations = RememberedTurns()
        self._vocabulary_of = vocabulary_of or vocabulary_of_engine
        self._vocabulary: asyncio.Future[Vocabulary | None] | None = None

    async def generate(
        self,
        generating: Generate,
        llm: Any,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """Generate an answer to the prompt with its exact tokens.

        Parameters have vLLM's names, because callers may pass them as keywords.
        """
        conversation = options.get("session_id")
        transfer = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
        moves = bool(transfer.get("moves"))
        prefill_leg = "do_remote_decode" in transfer
        if moves and conversation and not prefill_leg and not rendered_from_text(prompt, sampling_params):
            # A keeper sends an idle conversation as tokens, without their text.
            sent = array("i", prompt["prompt_token_ids"])
            self._conversations.put(str(conversation), RememberedTurn(sent, sent, Place(0, 0)))
        foreign = prefill_leg and not moves
        if not conversation or foreign or not rendered_from_text(prompt, sampling_params):
            async with aclosing(generating(llm, prompt, sampling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    yield output
            return
        rendered = array("i", prompt["prompt_token_ids"])
        if given := transfer.pop("prompt_token_ids", None):
            exact, place = array("i", given), Place(len(given), len(rendered))
        else:
            transferred = "do_remote_prefill" in transfer
            exact, place = await self._exact(llm, str(conversation), rendered, transferred)
        if place.known:
            prompt = {**prompt, "prompt_token_ids": exact.tolist()}
            prompt.pop("prompt_token_offsets", None)
        answer, deltas = array("i"), sampling_params.output_kind.name == "DELTA"
        try:
            async with aclosing(generating(llm, prompt, sampling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    generated = output.outputs[0].token_ids
                    if deltas:
                        answer.extend(generated)
                    else:
                        answer = array("i", generated)
                    yield output
        finally:
            if not prefill_leg:
                turn = RememberedTurn(rendered, exact + answer, place)
                self._conversations.put(str(conversation), turn)

    async def _exact(
        self, llm: Any, conversation: str, rendered: Tokens, transferred: bool
    ) -> tuple[Tokens, Place]:
        """Return the prompt's tokens, and the place up to which they come from the remembered turn."""
        if self._vocabulary is None:
            self._vocabulary = asyncio.ensure_future(asyncio.to_thread(self._vocabulary_of, llm))
        plain, last = (rendered, Place(0, 0)), self._conversations.get(conversation)
        if last is None:
            return plain
        place = equal = last.equal(rendered)
        if equal.known < len(last.tokens) and equal.rendered < len(rendered):
            await asyncio.wait((self._vocabulary,), timeout=VOCABULARY_S)
            vocabulary = self._vocabulary.result() if self._vocabulary.done() else None
            if vocabulary is None:
                _fall_back("no_vocabulary", conversation)
                return plain
            # This runs in a thread, because text after the first difference is compared token by token.
            place = await asyncio.to_thread(last.continued, rendered, equal, vocabulary)
        exact = last.tokens[: place.known] + rendered[place.rendered :]
        if exact == rendered:
            return plain
        if transferred or len(exact) >= llm.model_config.max_model_len:
            _fall_back("transferred" if transferred else "too_long", conversation)
            return plain
        KEPT.inc(place.known - equal.known)
        return exact, place


def _fall_back(cause: str, conversation: str) -> None:
    FALLBACKS.labels(cause).inc()
    log.warning("a prompt is computed without exact tokens cause=%s conversation=%s", cause, conversation)


def rendered_from_text(prompt: Any, params: Any) -> bool:
    """Return whether the prompt was rendered from one text, for one answer and without prompt logprobs."""
    tokens = isinstance(prompt, Mapping) and prompt.get("type") == "token"
    one = getattr(params, "n", 1) == 1 and getattr(params, "prompt_logprobs", None) is None
    return tokens and one and isinstance(prompt.get("prompt"), str) and hasattr(params, "output_kind")


def vocabulary_of_engine(llm: Any) -> Vocabulary | None:
    """Return the vocabulary of the engine's tokenizer, or None if its tokens' bytes are unknown."""
    try:
        return Vocabulary.of(llm.get_tokenizer())
    except Exception as wrong:  # noqa: BLE001 - an unknown tokenizer costs KV, but no turn fails
        log.warning("no exact tokens: the bytes of this tokenizer's tokens are unknown reason=%r", str(wrong))
        return None


class ExactTokensMiddleware:
    """Middleware that only patches vLLM's server to use exact tokens; requests pass through it unchanged."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        from kvtransfer.compat.relied_on import verify
        from workers.engine.compat.stream_replay import GENERATIONS, around_generations

        verify(GENERATIONS)
        around_generations(ExactTokens().generate)
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
