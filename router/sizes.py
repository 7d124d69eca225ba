"""Tokens from bytes: sizes that are known when a turn arrives, without a tokenizer."""

from router.directory.cache import Known
from router.turn import Turn

_WEIGHT = 0.2  # of a new observation
_LEAST_BYTES = 64  # shorter prompts are mostly the chat template


class TokenRatio:
    """Tokens a byte, as the engines' own counts show them."""

    def __init__(self, tokens_per_byte: float) -> None:
        self._ratio = tokens_per_byte
        self._learned = False

    def learn(self, size: int, tokens: int) -> None:
        if size < _LEAST_BYTES or tokens <= 0:
            return
        seen = tokens / size
        self._ratio = self._ratio + _WEIGHT * (seen - self._ratio) if self._learned else seen
        self._learned = True

    def tokens(self, size: int) -> int:
        return int(size * self._ratio)


def prompt_tokens(turn: Turn, ratio: TokenRatio, max_context: int) -> int:
    """Never above what an engine takes: images and files are far fewer tokens than bytes."""
    exact = turn.exact_tokens
    estimate = exact if exact is not None else ratio.tokens(turn.prompt_bytes)
    return max(1, min(estimate, max_context) if max_context else estimate)


def uncached_tokens(turn: Turn, known: Known, matched_bytes: int, ratio: TokenRatio) -> int:
    """What the decoder would have to compute, from observed sizes only.

    `matched_bytes` of the prompt were in an earlier request of this conversation, and what the decoder
    generated since is in its KV too. Nothing matched: the prefix broke, or this gateway has not seen the
    conversation before and has only the decoder's own count.
    """
    if turn.identity.previous_response:
        return ratio.tokens(turn.chain.total_bytes)
    if matched_bytes:
        return max(0, ratio.tokens(turn.chain.total_bytes - matched_bytes) - known.completion_tokens)
    whole = turn.exact_tokens or ratio.tokens(turn.prompt_bytes)
    return whole if known.prompt_bytes else max(0, whole - known.context_tokens)
