"""Sizes of prompts in tokens, estimated without a tokenizer from token counts that engines report."""

from xxhash import xxh3_128_digest

from placement.routing.prefix_map import PromptPrefix
from router.directory.api.cache import Known
from router.gateway.turn.turn import Turn

_WEIGHT = 0.2  # of a new observation
_LEAST_BYTES = 64  # shorter prompts are mostly the chat template
# Bounds on the tokens per byte learned from one prompt, because all owners share the ratio. Prose has 0.2 to
# 0.3.
_LEAST_RATIO, _MOST_RATIO = 0.05, 1.0


class TokenRatio:
    """Tokens per byte of prompt text, learned from the engines' counts.

    Only text changes the ratio: an image's tokens do not follow from its bytes, and prompts of token ids are
    counted exactly.
    """

    def __init__(self, tokens_per_byte: float) -> None:
        self._ratio = tokens_per_byte
        self._learned = False

    def learn(self, turn: Turn, tokens: int) -> None:
        """Update the ratio with the number of tokens that an engine counted in this turn's prompt."""
        prompt, size = turn.prompt, turn.prompt_bytes
        if size < _LEAST_BYTES or tokens <= 0 or prompt.chain.media or prompt.exact_tokens is not None:
            return
        seen = min(max(tokens / size, _LEAST_RATIO), _MOST_RATIO)
        self._ratio = self._ratio + _WEIGHT * (seen - self._ratio) if self._learned else seen
        self._learned = True

    def tokens(self, size: int) -> int:
        """Estimate how many tokens `size` bytes have."""
        return int(size * self._ratio)

    def prompt_tokens(self, turn: Turn, max_context: int) -> int:
        """Estimate the tokens of a turn's prompt, between 1 and `max_context` (0: without a bound)."""
        exact = turn.prompt.exact_tokens
        estimate = exact if exact is not None else self.tokens(turn.prompt_bytes)
        estimate += turn.resumed_tokens
        return max(1, min(estimate, max_context) if max_context else estimate)

    def prefixes(self, turn: Turn) -> tuple[PromptPrefix, ...]:
        """Return the prefixes of a turn's prompt that other conversations may share."""
        salt = turn.salt.encode("utf-8", "surrogatepass")
        return tuple(
            PromptPrefix(xxh3_128_digest(digest + salt), self.tokens(size + turn.prompt.tool_bytes))
            for digest, size in turn.prompt.prefixes
        )

    def uncached_tokens(self, turn: Turn, known: Known, matched_bytes: int) -> int:
        """Estimate how many tokens of the prompt the conversation's decoder has to compute.

        The first `matched_bytes` of the prompt were in an earlier request of this conversation. The KV of the
        tokens that the decoder generated since is cached too. If nothing matched, either the prefix broke, or
        this gateway sees the conversation for the first time and knows only the decoder's own count.
        """
        sent, exact = turn.prompt.chain.total_bytes, turn.prompt.exact_tokens
        if matched_bytes:
            new = sent - matched_bytes
            tokens = self.tokens(new) if exact is None else exact * new // sent
            return max(0, tokens - known.completion_tokens)
        whole = exact or self.tokens(turn.prompt_bytes)
        return whole if known.prompt_bytes else max(0, whole - known.context_tokens)
