"""A latency model that follows the engine it is for: its terms slowly, its speed at once."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np

from placement.latency import BatchWork, LatencyModel, Sample, fit


class Pace:
    """How slow the engine is just now beside what the model says.

    Clocks, heat and whoever shares the machine change that for seconds at a time: errors of iterations that
    follow one another are alike. It forgets within `memory_s`, and no iteration counts for more than
    `most_share` beside the present pace: what disturbed one of them is no pace.
    """

    def __init__(self, memory_s: float = 0.4, most_share: float = 0.15, bound: float = 1.5) -> None:
        self.factor = 1.0
        self._memory_s = memory_s
        self._most_share = most_share
        self._bound = bound

    def see(self, expected_s: float, seconds: float) -> None:
        off = seconds / expected_s - self.factor
        most = self._most_share * self.factor
        learned = 1 - math.exp(-seconds / self._memory_s)
        self._set(self.factor + min(max(off, -most), most) * learned)

    def rebase(self, before_s: float, now_s: float) -> None:
        """The model has changed; what it says of the latest work stays the same."""
        self._set(self.factor * before_s / now_s)

    def _set(self, factor: float) -> None:
        self.factor = min(max(factor, 1 / self._bound), self._bound)


@dataclass
class SelfCorrecting:
    """A model that follows the iterations it is shown.

    A few recent samples are kept for every size of batch (powers of two of new tokens), so a long stretch of
    decoding does not make it forget what a prefill costs. What it may change is bounded: between `1/bound`
    and `bound` times the base model, term by term, and the base is also the prior of every fit.
    """

    base: LatencyModel
    bound: float = 20.0
    per_bucket: int = 24
    every: int = 32
    prior_weight: float = 1e-3
    model: LatencyModel = field(init=False)  # what to go by: the fitted one at the present pace
    fitted: LatencyModel = field(init=False)
    observed: int = field(init=False, default=0)
    _buckets: dict[int, deque[Sample]] = field(init=False, default_factory=dict)
    _pace: Pace = field(init=False, default_factory=Pace)

    def __post_init__(self) -> None:
        self.model = self.fitted = self.base

    def observe(self, work: BatchWork, seconds: float) -> None:
        if work.new_tokens <= 0 or seconds <= 0:
            return
        bucket = self._buckets.setdefault(work.new_tokens.bit_length(), deque(maxlen=self.per_bucket))
        bucket.append(Sample(work, seconds))
        self.observed += 1
        before_s = max(self.fitted.seconds(work), 1e-9)
        self._pace.see(before_s, seconds)
        if self.observed % self.every == 0:
            self._refit()
            self._pace.rebase(before_s, max(self.fitted.seconds(work), 1e-9))
        self.model = self.fitted.scaled(self._pace.factor)

    def _refit(self) -> None:
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        fitted = fit(samples, self.base, self.prior_weight)
        fitted = fit(undisturbed(fitted, samples), self.base, self.prior_weight)
        self.fitted = LatencyModel(
            *(
                min(max(new, old / self.bound), old * self.bound)
                for new, old in zip(astuple(fitted), astuple(self.base), strict=True)
            )
        )


def undisturbed(model: LatencyModel, samples: Sequence[Sample], allowed: float = 1.25) -> list[Sample]:
    """Without those that took much longer than their like: something else had the machine meanwhile.

    An engine that became slower as a whole keeps all its samples: they are compared with their median.
    """
    slowness = [sample.seconds / max(model.seconds(sample.work), 1e-9) for sample in samples]
    limit = float(np.median(slowness)) * allowed
    return [sample for sample, slow in zip(samples, slowness, strict=True) if slow <= limit]
