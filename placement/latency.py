"""How long an iteration takes: a model over sums of its rows, fitted to what was measured.

A row computes `p` new tokens on top of `c` tokens of context. The iteration then costs

    per_token Σp + per_attended Σp(p+c) + per_before Σpc + per_context Σ(p+c) + per_row Σ1 + constant

The co-serving paper has a term for communication, which is also linear in Σp: the two cannot be told apart,
so they are one here. The sums are kept per row, because one row of 2,000 tokens attends to far more than two
of 1,000. Two terms are not the paper's: `per_before`, because new tokens attend to all of the context but,
being causal, to half of each other; and `per_row`, what a row costs whatever its length (sampling,
bookkeeping). They are zero in a model that was not measured.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What an iteration has to do, as the sums the model is linear in."""

    new_tokens: int = 0  # Σ p
    attended: int = 0  # Σ p (p + c)
    context: int = 0  # Σ (p + c)
    before: int = 0  # Σ p c
    rows: int = 0

    def plus(self, new_tokens: int, context: int) -> "BatchWork":
        """With one more row of `new_tokens` on top of `context`."""
        end = new_tokens + context
        return BatchWork(
            self.new_tokens + new_tokens,
            self.attended + new_tokens * end,
            self.context + end,
            self.before + new_tokens * context,
            self.rows + 1,
        )

    def __add__(self, other: "BatchWork") -> "BatchWork":
        return BatchWork(
            self.new_tokens + other.new_tokens,
            self.attended + other.attended,
            self.context + other.context,
            self.before + other.before,
            self.rows + other.rows,
        )

    @staticmethod
    def of(rows: Iterable[tuple[int, int]]) -> "BatchWork":
        """The work of rows given as (new tokens, context)."""
        work = BatchWork()
        for new_tokens, context in rows:
            work = work.plus(new_tokens, context)
        return work


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Seconds of an iteration. Coefficients are never negative, so more work never looks cheaper."""

    per_token: float
    per_attended: float
    per_context: float
    constant: float
    per_before: float = 0.0
    per_row: float = 0.0

    def __post_init__(self) -> None:
        if any(not math.isfinite(value) or value < 0 for value in astuple(self)):
            raise ValueError(f"coefficients of a latency model are finite and not negative: {self}")

    def seconds(self, work: BatchWork) -> float:
        return (
            self.per_token * work.new_tokens
            + self.per_attended * work.attended
            + self.per_context * work.context
            + self.per_before * work.before
            + self.per_row * work.rows
            + self.constant
        )

    def max_tokens(self, work: BatchWork, context: int, want: int, target_s: float) -> int:
        """The most tokens, at most `want`, of a row with `context` that join `work` within `target_s`.

        Closed form: adding p tokens makes the seconds a quadratic in p with no negative coefficient.
        """
        slack = target_s - self.seconds(work) - self.per_context * context - self.per_row
        if want <= 0 or slack < 0:
            return 0
        linear = self.per_token + (self.per_attended + self.per_before) * context + self.per_context
        root = linear + math.sqrt(linear * linear + 4 * self.per_attended * slack)
        if root == 0 or 2 * slack >= root * want:
            return want
        tokens = min(want, int(2 * slack / root) + 1)
        # The root is rounded to a whole token; the model itself decides on which side of it.
        while tokens > 0 and self.seconds(work.plus(tokens, context)) > target_s:
            tokens -= 1
        return tokens

    def scaled(self, factor: float) -> "LatencyModel":
        return LatencyModel(*(value * factor for value in astuple(self)))


# Slower than any accelerator this is meant for, and about right for a small model on two CPU cores: an engine
# without a profile admits little offline work at first, and more as it sees its own iterations.
CONSERVATIVE = LatencyModel(
    per_token=5e-4, per_attended=1e-7, per_context=2e-7, constant=2e-2, per_before=2e-8, per_row=1e-5
)


@dataclass(frozen=True, slots=True)
class Sample:
    work: BatchWork
    seconds: float


def _columns(samples: Sequence[Sample]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    return np.array(
        [
            (s.work.new_tokens, s.work.attended, s.work.context, 1.0, s.work.before, s.work.rows)
            for s in samples
        ],
        dtype=np.float64,
    )


def fit(
    samples: Sequence[Sample], prior: LatencyModel | None = None, prior_weight: float = 1e-3
) -> LatencyModel:
    """Least squares of the *relative* error with no negative coefficient.

    With a `prior`, each coefficient is also drawn weakly towards it, so that a term which the samples say
    nothing about (no long prefill seen yet) keeps the prior's value instead of falling to zero. A term that
    the prior does not have stays out.
    """
    from scipy.optimize import nnls

    usable = [s for s in samples if s.seconds > 0]
    if not usable:
        raise ValueError("a latency model needs at least one measured iteration that took time")
    seconds = np.array([s.seconds for s in usable])
    rows = _columns(usable) / seconds[:, None] / math.sqrt(len(usable))
    wanted = np.full(len(usable), 1 / math.sqrt(len(usable)))
    if prior is not None:
        known = np.array(astuple(prior))
        rows[:, known == 0] = 0
        pull = np.divide(math.sqrt(prior_weight), known, out=np.zeros_like(known), where=known > 0)
        rows = np.vstack([rows, np.diag(pull)])
        wanted = np.concatenate([wanted, np.where(known > 0, math.sqrt(prior_weight), 0.0)])
    # Columns differ by ten orders of magnitude; the solver wants them alike.
    scale = np.maximum(np.linalg.norm(rows, axis=0), 1e-300)
    solution, _ = nnls(rows / scale, wanted)
    return LatencyModel(*(float(value) for value in solution / scale))


@dataclass(frozen=True, slots=True)
class RegionError:
    """Relative error of a model among samples of similar shape."""

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
    """The error over all samples first, then by new tokens and context of the iteration."""
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
        RegionError(
            name,
            len(errors),
            float(np.median(errors)),
            float(np.quantile(errors, 0.9)),
            float(np.max(errors)),
        )
        for name, errors in regions.items()
        if errors
    )
