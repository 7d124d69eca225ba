"""Generates conversations and arrivals, and makes given conversations arrive faster, longer or shorter."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from traces import TraceError
from traces.format import Trace, TraceConversation, TraceHeader, TraceTurn, TurnEnding


def stream(seed: int, purpose: str) -> Random:
    """Return a random generator for one purpose, so that more draws for lengths do not change arrivals."""
    return Random(f"{seed}/{purpose}")


def lognormal(random: Random, mean: float, cv: float) -> float:
    if cv == 0.0:
        return mean
    variance = math.log1p(cv * cv)
    return random.lognormvariate(math.log(mean) - variance / 2.0, math.sqrt(variance))


def tokens(random: Random, mean: float, cv: float, least: int = 1) -> int:
    return max(least, round(lognormal(random, mean, cv)))


def geometric(random: Random, mean: float) -> int:
    """Draw from a geometric distribution; the result is at least 1."""
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of requests. The defaults are the co-serving paper's online load."""

    prompt_tokens: float = 4_096.0
    prompt_cv: float = 0.0
    output_tokens: float = 256.0
    output_cv: float = 0.0


def request_conversations(
    count: int, seed: int, lengths: RequestLengths | None = None
) -> Iterator[TraceConversation]:
    lengths = lengths or RequestLengths()
    random = stream(seed, "requests")
    for number in range(count):
        prompt = tokens(random, lengths.prompt_tokens, lengths.prompt_cv)
        output = tokens(random, lengths.output_tokens, lengths.output_cv)
        yield TraceConversation(f"request-{number:06d}", 0.0, (TraceTurn(prompt, 0, output),))


@dataclass(frozen=True, slots=True)
class SweBench:
    """Lengths of the conversation paper's workload: SWE-bench tasks with a long prompt and short later turns.

    The paper has no traces, but means: 15k prompt tokens of a first turn (25k tokens/s fill the prefiller at
    1.634 conversations/s, which makes 15.3k), 1k output tokens of a conversation, hundreds of appended tokens
    a turn, and outputs of "large variance". First turns are the upper 30 % of its TTFT curve, which makes 3.3
    turns a conversation. The paper does not say how long tools take; here it is half a second.
    """

    first_turn_tokens: float = 15_300.0
    first_turn_cv: float = 0.35
    turns: float = 10.0 / 3.0
    appended_tokens: float = 250.0  # a tool's answer
    appended_cv: float = 1.0
    output_tokens: float = 1_000.0  # mean output of a conversation
    output_cv: float = 1.0  # coefficient of variation of a turn's output
    tool_s: float = 0.5
    tool_cv: float = 1.0


def swe_bench_conversations(
    count: int, seed: int, mix: SweBench | None = None
) -> Iterator[TraceConversation]:
    """Yield conversations that all arrive at 0; `arriving` sets their times."""
    mix = mix or SweBench()
    random = stream(seed, "swe-bench")
    a_turn = mix.output_tokens / mix.turns
    for number in range(count):
        turns: list[TraceTurn] = []
        context = 0
        last = geometric(random, mix.turns) - 1
        for index in range(last + 1):
            mean, cv = mix.first_turn_tokens, mix.first_turn_cv
            if index:
                mean, cv = mix.appended_tokens, mix.appended_cv
            turn = TraceTurn(
                appended_tokens=tokens(random, mean, cv),
                cached_tokens=context,
                output_tokens=tokens(random, a_turn, mix.output_cv),
                wait_s=round(lognormal(random, mix.tool_s, mix.tool_cv), 6) if index else 0.0,
                ending=TurnEnding.END_OF_TURN if index == last else TurnEnding.TOOL_USE,
            )
            context = turn.context_tokens
            turns.append(turn)
        yield TraceConversation(f"swe-{number:06d}", 0.0, tuple(turns))


@dataclass(frozen=True, slots=True)
class RateStep:
    """A rate of `rate` conversations per second for `seconds`."""

    rate: float
    seconds: float


def gamma(rate: float, cv: float, random: Random) -> Iterator[float]:
    """Yield arrival times with gamma-distributed gaps: CV 1 is Poisson, higher is bursty, lower is steady."""
    _positive(rate=rate, cv=cv)
    shape = 1.0 / (cv * cv)
    at = 0.0
    while True:
        at += random.gammavariate(shape, 1.0 / (shape * rate))
        yield at


def poisson(rate: float, random: Random) -> Iterator[float]:
    return gamma(rate, 1.0, random)


def steps(pattern: Sequence[RateStep], random: Random) -> Iterator[float]:
    """Yield Poisson arrival times at a rate that changes in steps; the pattern repeats."""
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


def rate_steps(texts: Iterable[str]) -> tuple[RateStep, ...]:
    """Parse steps, each written as `RATE*SECONDS`."""
    try:
        return tuple(RateStep(*map(float, text.split("*"))) for text in texts)
    except (TypeError, ValueError) as error:
        raise TraceError(f"a step is RATE*SECONDS: {error}") from error


def arriving(
    conversations: Iterable[TraceConversation], times: Iterable[float]
) -> Iterator[TraceConversation]:
    """Yield the conversations in the given order, each with the next of `times` as its arrival."""
    for conversation, at in zip(conversations, times, strict=False):
        yield replace(conversation, arrival_s=round(at, 6))


def parse(text: str, random: Random) -> Iterator[float]:
    """Return the arrival times for `poisson:RATE`, `gamma:RATE:CV` or `steps:RATE*SECONDS,RATE*SECONDS,…`."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "poisson":
            return poisson(float(rest), random)
        if kind == "gamma":
            rate, cv = rest.split(":")
            return gamma(float(rate), float(cv), random)
        if kind == "steps":
            return steps(rate_steps(rest.split(",")), random)
    except (ValueError, TraceError) as error:
        raise TraceError(f"arrivals {text!r}: {error}") from error
    raise TraceError(f"arrivals {text!r}: expected poisson:RATE, gamma:RATE:CV or steps:RATE*SECONDS,…")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < float("inf"):
            raise TraceError(f"{name} must be above 0, not {value}")


def paper(count: int, rate: float, seed: int = 0, mix: SweBench | None = None) -> Trace:
    """Return SWE-bench-like conversations with Poisson arrivals."""
    times = poisson(rate, stream(seed, "arrivals"))
    return _trace(f"swe-bench, Poisson {rate}/s", seed, swe_bench_conversations(count, seed, mix), times)


def saturating(count: int, prefill_seconds: Callable[[int], float], seed: int = 0) -> Trace:
    """Return SWE-bench-like conversations whose arrivals keep one prefiller exactly full."""
    found = tuple(swe_bench_conversations(count, seed))
    # A conversation arrives when the prefiller has just finished the previous one: it is full, with no queue.
    times = accumulate((prefill_seconds(one.turns[0].appended_tokens) for one in found), initial=0.0)
    return _trace("swe-bench, prefiller exactly full", seed, iter(found), times)


def bursts(count: int, rate: float, cv: float, seed: int = 0, lengths: RequestLengths | None = None) -> Trace:
    """Return BurstGPT-like conversations: single turns with gamma-distributed gaps."""
    times = gamma(rate, cv, stream(seed, "arrivals"))
    return _trace(
        f"requests, gamma {rate}/s CV {cv}", seed, request_conversations(count, seed, lengths), times
    )


def step_bursts(count: int, pattern: tuple[RateStep, ...], seed: int = 0) -> Trace:
    """Return SWE-bench-like conversations at a rate that changes in steps."""
    times = steps(pattern, stream(seed, "arrivals"))
    shape = ", ".join(f"{step.rate}/s for {step.seconds} s" for step in pattern)
    return _trace(f"swe-bench, steps {shape}", seed, swe_bench_conversations(count, seed), times)


def _trace(what: str, seed: int, found: Iterator[TraceConversation], times: Iterator[float]) -> Trace:
    header = TraceHeader(source=f"generated: {what}", notes=f"seed {seed}")
    return Trace(header, tuple(arriving(found, times)))


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors by which `scale` changes conversations. A rate of 2 halves every gap between arrivals."""

    rate: float = 1.0
    lengths: float = 1.0
    waits: float = 1.0
    wait_cap_s: float = float("inf")  # longest wait after scaling, for people who come back the next day


def scale(conversations: Iterable[TraceConversation], by: Scale) -> Iterator[TraceConversation]:
    if by.rate <= 0.0 or by.lengths <= 0.0 or by.waits < 0.0 or by.wait_cap_s < 0.0:
        raise TraceError(f"cannot scale by {by}: rate and lengths must be above 0, waits not below it")
    for conversation in conversations:
        yield replace(
            conversation,
            arrival_s=round(conversation.arrival_s / by.rate, 6),
            turns=tuple(_turns(conversation.turns, by)),
        )


def _turns(turns: tuple[TraceTurn, ...], by: Scale) -> Iterator[TraceTurn]:
    """Scale turns. A turn that continued the whole context still does; else its cached part is scaled."""
    old_context = new_context = new_largest = 0
    for index, turn in enumerate(turns):
        whole = index > 0 and turn.cached_tokens == old_context
        cached = new_context if whole else int(turn.cached_tokens * by.lengths)
        if index:
            cached = min(cached, new_largest)
        scaled = replace(
            turn,
            appended_tokens=_tokens(turn.appended_tokens, by.lengths),
            cached_tokens=cached,
            output_tokens=_tokens(turn.output_tokens, by.lengths),
            wait_s=round(min(turn.wait_s * by.waits, by.wait_cap_s), 6),
            served_s=turn.served_s if by.lengths == 1.0 else None,
        )
        if scaled.prompt_tokens == 0:
            scaled = replace(scaled, appended_tokens=1)
        old_context, new_context = turn.context_tokens, scaled.context_tokens
        new_largest = max(new_largest, new_context)
        yield scaled


def _tokens(count: int, factor: float) -> int:
    return max(1, round(count * factor)) if count else 0


def fit(
    conversations: Iterable[TraceConversation], max_context: int, max_turns: int | None = None
) -> Iterator[TraceConversation]:
    """Cut each conversation before the first turn that does not fit. If no turn fits, leave it out."""
    for conversation in conversations:
        kept: list[TraceTurn] = []
        for turn in conversation.turns[:max_turns]:
            if turn.context_tokens > max_context:
                break
            kept.append(turn)
        if kept:
            yield replace(conversation, turns=tuple(kept))


def rebased(conversations: Iterable[TraceConversation]) -> Iterator[TraceConversation]:
    """Shift arrivals so that the first one is at 0."""
    start: float | None = None
    for conversation in conversations:
        start = conversation.arrival_s if start is None else start
        yield replace(conversation, arrival_s=round(conversation.arrival_s - start, 6))
