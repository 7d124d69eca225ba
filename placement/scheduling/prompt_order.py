"""Order of prompts in an engine, and how much they may lengthen iterations of decoding requests.

A prompt is due `stretch` times its remaining prefill time after its arrival, and the prompt that is due first
goes first. So a short prompt goes before a long one, because it makes the long one wait least. A long prompt
ends all the same, because short prompts that arrive after its due time go behind it.

An iteration in which a prompt ends computes no part of the next prompt, because that would delay the first
token of the prompt that ends. An overdue next prompt is an exception: then the engine is overloaded, and full
iterations compute more. With co-serving all iterations are full (`fills`), because co-serving is measured by
its slowest prompts.
"""

import math
from dataclasses import dataclass

from placement.scheduling.latency_model import BatchWork, LatencyModel

LEAST_CHUNK = 256  # tokens
RATE_WINDOW_S = 5.0  # over which the rate of prompt tokens is averaged


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """Rules for how prompts share iterations with decoding requests, in a real or simulated engine."""

    tbt_s: float  # SLO target of requests that decode
    stretch: float = 8.0  # multiple of its prefill time after which a prompt is due
    fills: bool = False  # whether an iteration in which a prompt ends also has a part of the next prompt

    def due(self, model: LatencyModel, arrival: float, pending: int, computed: int) -> float:
        """Return when a prompt with `pending` tokens after `computed` should end."""
        return arrival + self.stretch * model.seconds(BatchWork().plus(pending, computed))

    @staticmethod
    def chunk(model: LatencyModel, most: int) -> int:
        """Return the chunk size, at most `most` tokens, with which a long prompt is computed fastest.

        A token attends to all of its chunk, so a larger chunk costs more attention. A smaller chunk pays the
        iteration's constant more often.
        """
        saved, each = model.per_attended - model.per_before, model.constant + model.per_request
        return most if saved <= 0 else min(most, max(LEAST_CHUNK, int(math.sqrt(2 * each / saved))))

    def iteration_s(self, decoding_s: float) -> float:
        """Return how long an iteration with prompts may take if decoding alone takes `decoding_s`.

        Where the TBT target leaves less, prompts get half of the iteration all the same, so that they end.
        """
        return max(self.tbt_s, decoding_s * 2)

    def share(self, decoding_s: float) -> float:
        """Return the share of the engine's time that is left for prompts.

        `decoding_s` is the length of an iteration without prompts.
        """
        return 1 - decoding_s / self.iteration_s(decoding_s)

    def tokens(
        self,
        model: LatencyModel,
        work: BatchWork,
        decoding_s: float,
        computed: int,
        want: int,
    ) -> int:
        """Return how many of the next `want` tokens of a prompt join an iteration that already has `work`."""
        return model.max_tokens(work, computed, want, self.iteration_s(decoding_s))


class PromptRate:
    """Rate of prompt tokens per second in recent iterations that had prompts.

    An engine without prompts keeps its last rate, because the placer assumes this rate for its next prompts.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        kept = math.exp(-seconds / RATE_WINDOW_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def tokens_per_s(self) -> float:
        """Return the rate in prompt tokens per second, or 0 before the first prompt."""
        return self._tokens / self._seconds if self._seconds else 0.0
