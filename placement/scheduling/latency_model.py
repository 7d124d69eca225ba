"""Latency model: predicts an iteration's time from sums over its requests; fitted to measurements.

A request computes `p` new tokens on top of `c` tokens of context. The iteration then costs

    per_token Σp + per_attended Σp(p+c) + per_before Σpc + per_context Σ(p+c) + per_request Σ1 + constant

and `armed` more if it may be aborted.

These terms differ from the co-serving paper's. Its term for communication is also linear in Σp, so that it is
part of `per_token` here. `per_before` is new: new tokens attend to all of the context, but only to half of
each other, because attention is causal. `per_request` is new: the cost of a request at any length (sampling,
bookkeeping). Both may be zero.

The sums are formed per request, because one request of 2,000 tokens attends to far more than two of 1,000.
`SelfCorrecting` adapts a model to its engine: the coefficients slowly, the speed immediately.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from placement import PlacementError


class LatencyModelError(PlacementError, ValueError):
    """Error: the coefficients or samples cannot be a latency model."""


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Work of an iteration, as the sums that `LatencyModel` multiplies with its coefficients."""

    new_tokens: int = 0  # Σ p
    attended: int = 0  # Σ p (p + c)
    context: int = 0  # Σ (p + c)
    before: int = 0  # Σ p c
    requests: int = 0
    armed: int = 0  # 1 if the iteration may be aborted

    def plus(self, new_tokens: int, context: int) -> "BatchWork":
        """Return the work with one more request, which computes `new_tokens` after `context` tokens."""
        end = new_tokens + context
        return BatchWork(
            self.new_tokens + new_tokens,
            self.attended + new_tokens * end,
            self.context + end,
            self.before + new_tokens * context,
            self.requests + 1,
            self.armed,
        )

    def __add__(self, other: "BatchWork") -> "BatchWork":
        return BatchWork(
            self.new_tokens + other.new_tokens,
            self.attended + other.attended,
            self.context + other.context,
            self.before + other.before,
            self.requests + other.requests,
            self.armed | other.armed,
        )

    def next_tokens(self) -> "BatchWork":
        """Return the work of the next iteration, in which every request decodes one token."""
        n = self.requests
        return BatchWork(n, self.attended + n, self.context + n, self.before + n, n)

    @staticmethod
    def of(requests: Iterable[tuple[int, int]]) -> "BatchWork":
        """Return the work of one iteration with these requests, each given as (new tokens, context)."""
        tokens = attended = contexts = before = count = 0
        for new_tokens, context in requests:
            end = new_tokens + context
            tokens += new_tokens
            attended += new_tokens * end
            contexts += end
            before += new_tokens * context
            count += 1
        return BatchWork(tokens, attended, contexts, before, count)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Linear model of an iteration's time. No coefficient is negative, so more work never takes less time."""

    per_token: float
    per_attended: float
    per_context: float
    constant: float
    per_before: float = 0.0
    per_request: float = 0.0
    armed: float = 0.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in self.terms()):
            raise LatencyModelError(f"coefficients of a latency model are finite and not negative: {self}")

    def seconds(self, work: BatchWork) -> float:
        return (
            self.per_token * work.new_tokens
            + self.per_attended * work.attended
            + self.per_context * work.context
            + self.per_before * work.before
            + self.per_request * work.requests
            + self.armed * work.armed
            + self.constant
        )

    def max_tokens(self, work: BatchWork, context: int, want: int, target_s: float) -> int:
        """Return how many of `want` tokens of a request with `context` fit beside `work` within `target_s`.

        The result is computed directly, as the time is a quadratic in the tokens without negative
        coefficients.
        """
        slack = target_s - self.seconds(work) - self.per_context * context - self.per_request
        if want <= 0 or slack < 0:
            return 0
        if slack == math.inf:
            return want
        linear = self.per_token + (self.per_attended + self.per_before) * context + self.per_context
        root = linear + math.sqrt(linear * linear + 4 * self.per_attended * slack)
        if root == 0 or 2 * slack >= root * want:
            return want
        tokens = min(want, int(2 * slack / root) + 1)
        # The root may be rounded either way; the model itself decides whether the last token fits.
        while tokens > 0 and self.seconds(work.plus(tokens, context)) > target_s:
            tokens -= 1
        return tokens

    def terms(self) -> tuple[float, ...]:
        """Return the coefficients in field order. `astuple` would copy deeply, which is too slow here."""
        return (
            self.per_token,
            self.per_attended,
            self.per_context,
            self.constant,
            self.per_before,
            self.per_request,
            self.armed,
        )

    def scaled(self, factor: float) -> "LatencyModel":
        return LatencyModel(*(value * factor for value in self.terms()))


# Model of an engine without a profile: slower than any supported accelerator, and about right for a small
# model on two CPU cores. The engine admits little offline work at first, and more as it measures iterations.
CONSERVATIVE = LatencyModel(
    per_token=5e-4, per_attended=1e-7, per_context=2e-7, constant=2e-2, per_before=2e-8, per_request=1e-5
)


@dataclass(frozen=True, slots=True)
class Sample:
    work: BatchWork
    seconds: float


def fit(
    samples: Sequence[Sample], prior: LatencyModel | None = None, prior_weight: float = 1e-3
) -> LatencyModel:
    """Fit a model by least squares of the relative error, without negative coefficients.

    With a `prior`, each coefficient is also drawn weakly towards the prior's. So a coefficient about which
    the samples say nothing (no long prefill yet) keeps the prior's value instead of falling to zero. A
    coefficient that is zero in the prior stays zero.
    """
    import numpy as np  # imported here, because gateways only read models and start twice as fast without it
    from scipy.optimize import nnls

    usable = [s for s in samples if s.seconds > 0]
    if not usable:
        raise LatencyModelError("a latency model needs at least one measured iteration that took time")
    seconds = np.array([s.seconds for s in usable])
    works = [s.work for s in usable]
    sums = [(w.new_tokens, w.attended, w.context, 1.0, w.before, w.requests, w.armed) for w in works]
    rows = np.array(sums, dtype=np.float64) / seconds[:, None] / math.sqrt(len(usable))
    wanted = np.full(len(usable), 1 / math.sqrt(len(usable)))
    if prior is not None:
        known = np.array(prior.terms())
        rows[:, known == 0] = 0
        pull = np.divide(math.sqrt(prior_weight), known, out=np.zeros_like(known), where=known > 0)
        rows = np.vstack([rows, np.diag(pull)])
        wanted = np.concatenate([wanted, np.where(known > 0, math.sqrt(prior_weight), 0.0)])
    # Columns differ by ten orders of magnitude, and the solver needs columns of similar size.
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    solution, _ = nnls(rows / scale, wanted)
    return LatencyModel(*(float(value) for value in solution / scale))


@dataclass(frozen=True, slots=True)
class RegionError:
    """Statistics of a model's relative error over samples of similar size."""

    region: str
    samples: int
    median: float
    p90: float
    worst: float


def _bucket(tokens: int) -> str:
    for limit, name in ((64, "≤64"), (512, "≤512"), (2048, "≤2048")):
        if tokens <= limit:
            return name
    return ">2048"


def error_by_region(model: LatencyModel, samples: Sequence[Sample]) -> tuple[RegionError, ...]:
    """Return the error over all samples, and over each range of new tokens and context."""
    import numpy as np

    regions: dict[str, list[float]] = {"all": []}
    for sample in samples:
        if sample.seconds <= 0:
            continue
        error = abs(model.seconds(sample.work) - sample.seconds) / sample.seconds
        before = sample.work.context - sample.work.new_tokens
        name = f"new {_bucket(sample.work.new_tokens)}, context {_bucket(before)}"
        regions["all"].append(error)
        regions.setdefault(name, []).append(error)
    return tuple(
        RegionError(name, len(each), *(float(np.quantile(each, at)) for at in (0.5, 0.9, 1.0)))
        for name, each in regions.items()
        if each
    )


# An iteration with at least this many prompt tokens counts several times: a prefiller has few iterations.
PROMPT_TOKENS, PROMPTS_COUNT = 64, 4
# Least time between two fits: a fit takes a millisecond of the host, a fifth of a GPU's iteration.
FIT_EVERY_S = 1.0
# Bounds of an undisturbed iteration's slowness, relative to the median of batches of its size.
TOO_FAST, TOO_SLOW = 0.5, 1.25
FEW_SAMPLES = 4  # a bucket with fewer samples is judged together with its neighbours


class SpeedFactor:
    """Factor by which the engine is currently slower than the model predicts.

    Clocks, heat and other processes change an engine's speed for seconds at a time, so that successive
    iterations have similar errors. The factor is averaged over about `memory_s`. No iteration moves it by
    more than the share `most_share`, because a single slow iteration does not show the engine's speed.
    """

    def __init__(self, memory_s: float = 0.4, most_share: float = 0.15, bound: float = 1.5) -> None:
        self.factor = 1.0
        self._memory_s = memory_s
        self._most_share = most_share
        self._bound = bound

    def observe(self, expected_s: float, seconds: float) -> None:
        off = seconds / expected_s - self.factor
        most = self._most_share * self.factor
        learned = 1 - math.exp(-seconds / self._memory_s)
        self._set(self.factor + min(max(off, -most), most) * learned)

    def rebase(self, before_s: float, now_s: float) -> None:
        """Adapt the factor to a new model: it predicts `now_s` where the old model predicted `before_s`."""
        self._set(self.factor * before_s / now_s)

    def _set(self, factor: float) -> None:
        self.factor = min(max(factor, 1 / self._bound), self._bound)


@dataclass
class SelfCorrecting:
    """Latency model that adapts to the measured iterations of its engine.

    It keeps a few recent samples for every size of batch (by powers of two of new tokens), so that a long
    period of decoding does not make it forget what a prefill costs. The base model is the prior of every fit.
    Each coefficient stays between `1/bound` and `bound` times that of the base model.
    """

    base: LatencyModel
    bound: float = 20.0
    per_bucket: int = 24
    every: int = 32  # iterations between fits; a quarter of them in the beginning
    prior_weight: float = 1e-3
    model: LatencyModel = field(init=False)  # the fitted model, scaled to the current speed
    fitted: LatencyModel = field(init=False)
    observed: int = field(init=False, default=0)
    _since: int = field(init=False, default=0)  # iterations since the last fit
    _since_s: float = field(init=False, default=0.0)  # time of these iterations
    _buckets: dict[int, deque[Sample]] = field(init=False, default_factory=dict)
    _speed: SpeedFactor = field(init=False, default_factory=SpeedFactor)

    def __post_init__(self) -> None:
        self.model = self.fitted = self.base

    def observe(self, work: BatchWork, seconds: float) -> None:
        if work.new_tokens <= 0 or seconds <= 0:
            return
        bucket = self._buckets.setdefault(work.new_tokens.bit_length(), deque(maxlen=self.per_bucket))
        bucket.append(Sample(work, seconds))
        self.observed += 1
        self._since += PROMPTS_COUNT if work.new_tokens - work.requests >= PROMPT_TOKENS else 1
        before_s = max(self.fitted.seconds(work), 1e-9)
        self._speed.observe(before_s, seconds)
        self._since_s += seconds
        if self._due():
            self._since, self._since_s = 0, 0.0
            self._refit()
            self._speed.rebase(before_s, max(self.fitted.seconds(work), 1e-9))
        self.model = self.fitted.scaled(self._speed.factor)

    def _due(self) -> bool:
        if self.observed <= 2 * self.every:
            return self._since >= self.every // 4
        return self._since >= self.every and self._since_s >= FIT_EVERY_S

    def _refit(self) -> None:
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        fitted = fit(samples, self.base, self.prior_weight)
        fitted = fit(undisturbed(fitted, self._buckets), self.base, self.prior_weight)
        self.fitted = LatencyModel(
            *(
                min(max(new, old / self.bound), old * self.bound)
                for new, old in zip(fitted.terms(), self.base.terms(), strict=True)
            )
        )


def undisturbed(model: LatencyModel, buckets: Mapping[int, Iterable[Sample]]) -> list[Sample]:
    """Return the samples whose measured time was not changed by other work of the machine.

    Another process slows an iteration down. With asynchronous scheduling the next iteration then looks short,
    because the device computed it while the host was late. A sample's slowness is its time relative to the
    model's prediction, and it is compared with the median of its bucket. So all samples are kept if the
    engine became slower as a whole, or if the model is wrong about batches of this size. A bucket with few
    samples is judged together with its neighbours.
    """
    slowness = {
        size: [(sample.seconds / max(model.seconds(sample.work), 1e-9), sample) for sample in samples]
        for size, samples in buckets.items()
    }
    kept = []
    for size, samples in slowness.items():
        sizes = (size,) if len(samples) >= FEW_SAMPLES else (size - 1, size, size + 1)
        typical = statistics.median_low(slow for near in sizes for slow, _ in slowness.get(near, ()))
        least, most = TOO_FAST * typical, TOO_SLOW * typical
        kept += [sample for slow, sample in samples if least <= slow <= most]
    return kept
