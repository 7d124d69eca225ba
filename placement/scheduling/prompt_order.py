"""Prompts of an iteration: which goes first, and how long they may make it for requests that decode.

The shortest remaining prompt goes first, because it makes the others wait least. A prompt ages: each is due
after `stretch` times what it takes alone, counted from its arrival, so whatever is short and comes later than
that goes behind it, and a long one ends. A prompt that ends in an iteration is not made to wait for a part of
the next one, unless that is overdue: then there is more to compute than time, and full iterations compute
more. With co-serving iterations are always full (`fills`): it is measured by the worst of its prompts.
"""

import math
from dataclasses import dataclass

from placement.scheduling.latency_model import BatchWork, LatencyModel

LEAST_CHUNK = 256  # tokens
LESSER_SHARE = 0.1  # of the time, what lesser classes have at least beside a better one
LATELY_S = 5.0  # over which the rate of prompts is averaged


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """Policy of an engine, real or simulated, for prompts beside requests that decode."""

    tbt_s: float  # SLO target of requests that decode
    stretch: float = 8.0
    fills: bool = False  # an iteration in which a prompt ends has a part of the next one, too
    arriving_s: float = (
        math.inf
    )  # an iteration of prompts at most, of which a better class's that comes waits for the end

    def due(self, model: LatencyModel, arrival: float, pending: int, computed: int) -> float:
        """Sorting key of prompts: the least goes first."""
        return arrival + self.stretch * model.seconds(BatchWork().plus(pending, computed))

    @staticmethod
    def chunk(model: LatencyModel, most: int) -> int:
        """Tokens of an iteration with which a long prompt takes least: a token attends to all of its chunk.

        So a larger one costs attention, and a smaller one the constant more often.
        """
        saved, each = model.per_attended - model.per_before, model.constant + model.per_request
        return most if saved <= 0 else min(most, max(LEAST_CHUNK, int(math.sqrt(2 * each / saved))))

    def iteration_s(self, decoding_s: float) -> float:
        """What an iteration may take with prompts in it: half is theirs, or they would never end."""
        return max(self.tbt_s, decoding_s * 2)

    def share(self, decoding_s: float) -> float:
        """Of the engine's time, what is left to prompts; `decoding_s` is an iteration without them."""
        return 1 - decoding_s / self.iteration_s(decoding_s)

    def tokens(
        self,
        model: LatencyModel,
        work: BatchWork,
        decoding_s: float,
        computed: int,
        want: int,
    ) -> int:
        """Of the next prompt, that join an iteration which has `work` so far."""
        return model.max_tokens(work, computed, want, self.iteration_s(decoding_s))


class PromptRate:
    """Tokens of prompts a second of iterations that had some, of late.

    An engine without prompts keeps its rate: it would have it again, and whoever places goes by it.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def see(self, tokens: int, seconds: float) -> None:
        """An iteration that ended."""
        kept = math.exp(-seconds / LATELY_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def tokens_per_s(self) -> float:
        """0: none yet."""
        return self._tokens / self._seconds if self._seconds else 0.0
