"""Exact tokens: a prompt goes to the engine in the tokens that were generated, where these say the same text.

An answer comes back as text within the next turn's prompt, and text may tokenise otherwise than it was
generated: the answer's KV is of no use from the first such place on. So an engine's server remembers the
tokens of each conversation's last turn. When vLLM has rendered the next prompt, the longest beginning of them
that says the same as a beginning of the prompt takes its place, where every API hands its tokens to the
engine. What differs in text (edits, stripped reasoning, tool calls rendered anew) is other tokens, as without
this. A conversation that moves begins on its other engine with what its text tokenises to.
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

MOST_BYTES = 128 << 20  # of all conversations' tokens; beyond it those go that were longest silent
MOST_READ = 65_536  # tokens of one prompt that are compared as text, some 0.1 s
BESIDE_TOKENS = 1_024  # bytes that a turn takes beside its tokens
VOCABULARY_S = 5.0  # for which a turn waits for it
_AT_A_TIME = 4_096

KEPT = Counter(
    "conserve_prefix_exact_tokens_total",
    "Tokens of answers that the next turn's prompt took as they had been generated, from the first on that "
    "their text tokenises to otherwise: their KV stays of use.",
)
FALLBACKS = Counter(
    "conserve_prefix_exact_fallbacks_total",
    "Prompts whose text tokenised otherwise than it was generated and that were computed so, by cause: "
    "transferred (a prefiller computes it, from its text), too_long (for the model's context), "
    "no_vocabulary (what this tokenizer's tokens say is not known).",
    ["cause"],
)
for _cause in ("transferred", "too_long", "no_vocabulary"):
    FALLBACKS.labels(_cause)

Generate = Callable[..., AsyncGenerator[Any, None]]
Tokens: TypeAlias = "array[int]"


class Vocabulary:
    """What each token says: bytes; None for special ones, which only equal themselves."""

    def __init__(self, says: Sequence[bytes | None]) -> None:
        self._says = says

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        from xgrammar import TokenizerInfo

        says: list[bytes | None] = list(TokenizerInfo.from_huggingface(tokenizer).decoded_vocab)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        for special in {*tokenizer.all_special_ids, *(token for token, one in added.items() if one.special)}:
            if special < len(says):
                says[special] = None
        return cls(says)

    def says(self, token: int) -> bytes | None:
        return self._says[token] if 0 <= token < len(self._says) else None

    def goes_on(self, token: int) -> bool:
        """It begins within a character."""
        said = self.says(token)
        return bool(said) and said[0] & 0xC0 == 0x80  # type: ignore[index]


class Place(NamedTuple):
    """In two rows of tokens, up to which both say the same."""

    known: int
    rendered: int


class _Reader:
    """Reads tokens as clients do: bytes that are no text become U+FFFD."""

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
        said = self._vocabulary.says(token)
        if said is None:  # between surrogates, which no text has
            self.text += self._decoder.decode(b"", final=True) + f"\ud800{token}\udfff"
            self._decoder.reset()
        else:
            self.text += self._decoder.decode(said)
        return True

    @property
    def between_characters(self) -> bool:
        return not self.text and not self._decoder.getstate()[0]


def agreeing(known: Sequence[int], rendered: Sequence[int], since: Place, vocabulary: Vocabulary) -> Place:
    """The last place up to which both say the same, from one where they do."""
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
    """So many tokens at their beginnings are equal."""
    same, end = 0, min(len(one), len(other))
    while same < end and one[same : same + _AT_A_TIME] == other[same : same + _AT_A_TIME]:
        same = min(same + _AT_A_TIME, end)
    while same < end and one[same] == other[same]:
        same += 1
    return same


@dataclass(frozen=True, slots=True)
class RememberedTurn:
    """The last one of a conversation."""

    rendered: Tokens
    """Its prompt as the text tokenises."""
    tokens: Tokens
    """Its prompt as it was computed, and its answer."""
    since: Place
    """From here on both prompts are the same tokens."""

    def equal(self, rendered: Tokens) -> Place:
        """The last place up to which a prompt is of the same tokens, where it goes on with this turn's."""
        same = common(self.rendered, rendered)
        shift = self.since.known - self.since.rendered
        if same < self.since.rendered:
            same = shift = 0
        same += common(self.tokens[same + shift :], rendered[same:])
        return Place(same + shift, same)

    def continued(self, rendered: Tokens, equal: Place, vocabulary: Vocabulary) -> Place:
        """The last place up to which it says the same."""
        shift = equal.known - equal.rendered
        same = equal.rendered
        floor = self.since.rendered if same >= self.since.rendered else 0
        while same > floor and self._within_character(same, shift, rendered, vocabulary):
            same -= 1
        return max(equal, agreeing(self.tokens, rendered, Place(same + shift, same), vocabulary))

    def _within_character(self, at: int, shift: int, rendered: Tokens, vocabulary: Vocabulary) -> bool:
        following = (*self.tokens[at + shift : at + shift + 1], *rendered[at : at + 1])
        return any(map(vocabulary.goes_on, following))

    @property
    def bytes(self) -> int:
        return BESIDE_TOKENS + self.rendered.itemsize * (len(self.rendered) + len(self.tokens))


class RememberedTurns:
    """The last turn of each, as many as there is memory for."""

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
    """Of one engine's server: stands in front of `AsyncLLM.generate`."""

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
        """Parameters have vLLM's names: its callers may name them."""
        conversation = options.get("session_id")
        transfer = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
        a_leg = "do_remote_decode" in transfer
        if not conversation or a_leg or not rendered_from_text(prompt, sampling_params):
            async with aclosing(generating(llm, prompt, sampling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    yield output
            return
        rendered = array("i", prompt["prompt_token_ids"])
        exact, place = await self._exact(llm, str(conversation), rendered, "do_remote_prefill" in transfer)
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
            self._conversations.put(str(conversation), RememberedTurn(rendered, exact + answer, place))

    async def _exact(
        self, llm: Any, conversation: str, rendered: Tokens, transferred: bool
    ) -> tuple[Tokens, Place]:
        """The prompt as it is computed, and up to where that is what is remembered."""
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
            # Beside the loop: what follows the first drift is compared token by token.
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
    log.warning("a prompt is computed as its text tokenises cause=%s conversation=%s", cause, conversation)


def rendered_from_text(prompt: Any, params: Any) -> bool:
    """One prompt, which vLLM tokenised, with one answer, whose tokens nobody asks about."""
    tokens = isinstance(prompt, Mapping) and prompt.get("type") == "token"
    one = getattr(params, "n", 1) == 1 and getattr(params, "prompt_logprobs", None) is None
    return tokens and one and isinstance(prompt.get("prompt"), str) and hasattr(params, "output_kind")


def vocabulary_of_engine(llm: Any) -> Vocabulary | None:
    try:
        return Vocabulary.of(llm.get_tokenizer())
    except Exception as wrong:  # noqa: BLE001 -- whatever a tokenizer raises costs KV, and no turn
        log.warning("no exact tokens: what this tokenizer's tokens say is not known reason=%r", str(wrong))
        return None


class ExactTokensMiddleware:
    """How vLLM's server is told of it; requests pass through."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        from kvtransfer.compat.relied_on import verify
        from workers.engine.compat.stream_replay import GENERATIONS, around_generations

        verify(GENERATIONS)
        around_generations(ExactTokens().generate)
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
