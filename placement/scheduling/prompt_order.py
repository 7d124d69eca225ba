"""Order of prompts in an engine, and how much they may lengthen iterations of decoding requests.

The shortest remaining prompt goes first, because it makes the others wait least. A prompt ages: it is due
`stretch` times its own prefill time after its arrival. Prompts are sorted by due time, so a short one that
comes later than that goes behind, and a long one ends.

A prompt that ends in an iteration does not wait for a part of the next one, unless that is overdue: then
there is more to compute than time, and full iterations compute more. With co-serving iterations are always
full (`fills`), because co-serving is measured by the worst of its prompts.
"""

import math
from dataclasses import dataclass

from placement.scheduling.latency_model import BatchWork, LatencyModel

LEAST_CHUNK = 256  # tokens
RATE_WINDOW_S = 5.0  # over which the rate of prompts is averaged


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """Policy for prompts beside decoding requests, in a real or simulated engine."""

    tbt_s: float  # SLO target of requests that decode
    stretch: float = 8.0
    fills: bool = False  # an iteration in which a prompt ends also has a part of the next one

    def due(self, model: LatencyModel, arrival: float, pending: int, computed: int) -> float:
        """Return when a prompt should end; prompts are computed in order of this time."""
        return arrival + self.stretch * model.seconds(BatchWork().plus(pending, computed))

    @staticmethod
    def chunk(model: LatencyModel, most: int) -> int:
        """Return the chunk size, in tokens, with which a long prompt is computed fastest.

        A token attends to all of its chunk, so a larger chunk costs attention. A smaller one costs the
        iteration's constant more often.
        """
        saved, each = model.per_attended - model.per_before, model.constant + model.per_request
        return most if saved <= 0 else min(most, max(LEAST_CHUNK, int(math.sqrt(2 * each / saved))))

    def iteration_s(self, decoding_s: float) -> float:
        """Return how long an iteration with prompts may take. Prompts get half of it, so that they finish."""
        return max(self.tbt_s, decoding_s * 2)

    def share(self, decoding_s: float) -> float:
        """Return the share of the engine's time that is left for prompts.

        `decoding_s` is an iteration without prompts.
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
        """Return how many tokens of the next prompt join an iteration that already has `work`."""
        return model.max_tokens(work, computed, want, self.iteration_s(decoding_s))


class PromptRate:
    """Prompt tokens per second in recent iterations that had prompts.

    An engine without prompts keeps its rate: it would have that rate again, and the placer uses it.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        kept = math.exp(-seconds / RATE_WINDOW_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def tokens_per_s(self) -> float:
        """Return the prompt tokens per second; 0 before the first prompt."""
        return self._tokens / self._seconds if self._seconds else 0.0
