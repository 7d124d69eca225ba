"""Describes a trace in numbers: totals, percentiles, and how many later turns append a lot."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from placement.routing.placer_settings import Redisaggregation
from traces.format import TraceConversation

LARGE_APPEND_TOKENS = Redisaggregation().above_tokens  # a later turn that appends more is as heavy as a first

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a quantity over many cases."""

    count: int
    mean: float
    least: float
    percentiles: tuple[float, ...]  # at PERCENTILES
    most: float

    def at(self, percentile: int) -> float:
        return self.percentiles[PERCENTILES.index(percentile)]


def spread(values: Iterable[float]) -> Spread | None:
    """Return the distribution of values, or None if there are no values."""
    found = np.fromiter(values, dtype=float)
    if not found.size:
        return None
    at = tuple(float(value) for value in np.percentile(found, PERCENTILES))
    return Spread(int(found.size), float(found.mean()), float(found.min()), at, float(found.max()))


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity of conversations, with its name and unit."""

    name: str
    unit: str
    values: Callable[[TraceConversation], Iterable[float]]


QUANTITIES = (
    Quantity("first_turn_input", "tokens", lambda c: (c.turns[0].appended_tokens,)),
    Quantity("later_turn_appended", "tokens", lambda c: (turn.appended_tokens for turn in c.turns[1:])),
    Quantity("turn_output", "tokens", lambda c: (turn.output_tokens for turn in c.turns)),
    Quantity("wait", "s", lambda c: (turn.wait_s for turn in c.turns[1:])),
    Quantity("turns", "", lambda c: (len(c.turns),)),
    Quantity("conversation_input", "tokens", lambda c: (c.input_tokens,)),
    Quantity("conversation_output", "tokens", lambda c: (c.output_tokens,)),
    Quantity("peak_context", "tokens", lambda c: (c.peak_context_tokens,)),
    Quantity("waiting_in_all", "s", lambda c: (c.wait_s,)),
)


@dataclass(frozen=True, slots=True)
class LargeAppends:
    """Frequency and weight of later turns that append more than `LARGE_APPEND_TOKENS`."""

    share_of_later_turns: float
    share_of_conversations: float
    share_of_later_tokens: float


@dataclass(frozen=True, slots=True)
class Description:
    conversations: int
    turns: int
    prompt_tokens: int  # tokens as sent, cached ones included
    appended_tokens: int
    output_tokens: int
    cached_share: float  # cached share of prompt tokens
    duration_s: float  # from the first to the last arrival
    rate: float  # conversations per second; 0 where all arrive at once
    gap_cv: float  # coefficient of variation of arrivals: 1 is Poisson
    endings: dict[str, int]
    model_classes: dict[str, int]
    children: int
    large_appends: LargeAppends
    spreads: dict[str, Spread]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "percentiles": list(PERCENTILES)}


def describe(conversations: Sequence[TraceConversation]) -> Description:
    turns = [turn for conversation in conversations for turn in conversation.turns]
    prompts, appended = sum(t.prompt_tokens for t in turns), sum(t.appended_tokens for t in turns)
    duration, rate, cv = _arrivals([conversation.arrival_s for conversation in conversations])
    spreads = {
        quantity.name: found
        for quantity in QUANTITIES
        if (found := spread(value for c in conversations for value in quantity.values(c)))
    }
    return Description(
        conversations=len(conversations),
        turns=len(turns),
        prompt_tokens=prompts,
        appended_tokens=appended,
        output_tokens=sum(turn.output_tokens for turn in turns),
        cached_share=1.0 - appended / prompts if prompts else 0.0,
        duration_s=duration,
        rate=rate,
        gap_cv=cv,
        endings=dict(Counter(turn.ending.value for turn in turns)),
        model_classes=dict(Counter(c.model_class for c in conversations if c.model_class).most_common(10)),
        children=sum(c.parent is not None for c in conversations),
        large_appends=_large_appends(conversations),
        spreads=spreads,
    )


def _arrivals(times: Sequence[float]) -> tuple[float, float, float]:
    gaps = [after - before for before, after in pairwise(times)]
    duration = sum(gaps)
    if duration <= 0.0:
        return 0.0, 0.0, 0.0
    mean = duration / len(gaps)
    return duration, 1.0 / mean, statistics.pstdev(gaps) / mean


def _large_appends(conversations: Sequence[TraceConversation]) -> LargeAppends:
    later = [[turn.appended_tokens for turn in conversation.turns[1:]] for conversation in conversations]
    sizes = [size for turns in later for size in turns]
    large = [size for size in sizes if size > LARGE_APPEND_TOKENS]
    having = sum(any(size > LARGE_APPEND_TOKENS for size in turns) for turns in later)
    return LargeAppends(
        share_of_later_turns=len(large) / len(sizes) if sizes else 0.0,
        share_of_conversations=having / len(later) if later else 0.0,
        share_of_later_tokens=sum(large) / sum(sizes) if sum(sizes) else 0.0,
    )
