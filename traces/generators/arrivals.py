"""When conversations arrive: each pattern is an iterator of times, the same for the same seed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from traces.format import Conversation, TraceError


@dataclass(frozen=True, slots=True)
class Step:
    """`rate` conversations a second for `seconds`."""

    rate: float
    seconds: float


def gamma(rate: float, cv: float, random: Random) -> Iterator[float]:
    """Gaps of a gamma distribution: CV 1 is Poisson, above it bursts (BurstGPT), below it a steady beat."""
    _positive(rate=rate, cv=cv)
    shape = 1.0 / (cv * cv)
    at = 0.0
    while True:
        at += random.gammavariate(shape, 1.0 / (shape * rate))
        yield at


def poisson(rate: float, random: Random) -> Iterator[float]:
    return gamma(rate, 1.0, random)


def saturating(
    conversations: Iterable[Conversation], prefill_seconds: Callable[[int], float]
) -> Iterator[float]:
    """Each conversation arrives when the prefiller has just finished the one before: full, no queue."""
    at = 0.0
    for conversation in conversations:
        yield at
        at += prefill_seconds(conversation.turns[0].appended_tokens)


def steps(pattern: Sequence[Step], random: Random) -> Iterator[float]:
    """Poisson arrivals at a rate that jumps; the pattern repeats."""
    for step in pattern:
        if step.rate < 0.0:
            raise TraceError(f"a step's rate cannot be {step.rate}")
        _positive(seconds=step.seconds)
    if not any(step.rate > 0.0 for step in pattern):
        raise TraceError("a step pattern needs at least one step with arrivals")
    start = 0.0
    while True:
        for step in pattern:
            end = start + step.seconds
            at = start + (random.expovariate(step.rate) if step.rate > 0.0 else step.seconds)
            while at < end:
                yield at
                at += random.expovariate(step.rate)
            start = end


def arriving(conversations: Iterable[Conversation], times: Iterable[float]) -> Iterator[Conversation]:
    """The conversations at new times, in the order given."""
    for conversation, at in zip(conversations, times, strict=False):
        yield replace(conversation, arrival_s=round(at, 6))


def parse(text: str, random: Random) -> Iterator[float]:
    """`poisson:RATE`, `gamma:RATE:CV` or `steps:RATE*SECONDS,RATE*SECONDS,…`."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "poisson":
            return poisson(float(rest), random)
        if kind == "gamma":
            rate, cv = rest.split(":")
            return gamma(float(rate), float(cv), random)
        if kind == "steps":
            return steps([Step(*map(float, part.split("*"))) for part in rest.split(",")], random)
    except (TypeError, ValueError) as error:
        raise TraceError(f"arrivals {text!r}: {error}") from error
    raise TraceError(f"arrivals {text!r}: expected poisson:RATE, gamma:RATE:CV or steps:RATE*SECONDS,…")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < float("inf"):
            raise TraceError(f"{name} must be above 0, not {value}")
