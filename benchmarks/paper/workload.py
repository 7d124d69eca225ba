"""Makes conversations of the paper's mix, reads those of recorded agents, and sets their arrival times.

The paper gives means (15k tokens in, 1k out) and shapes: 3.3 to 5 turns a conversation, appends of hundreds
of tokens. Here a conversation has 2 to 5 turns and a moderate spread of lengths, and all 2,294 tasks of the
SWE-bench test set are played, since the paper does not say how many it plays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.paper import a40
from traces import NotATrace, generators, importers
from traces.format import TraceConversation, TraceTurn, TurnEnding, load
from traces.simulator.engine import EventQueue, SimulatedEngine
from traces.simulator.kv import LiveConversation, Pressure
from traces.simulator.tiers import prefill_seconds

FAR_APART_S = 10_000.0
SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "agents.jsonl.gz"
SHRINK = 8  # divisor of real lengths, so that the longest contexts fit the paper's decoders
LONGEST = int(a40.ENGINE.kv_tokens * 0.4)


@dataclass(frozen=True, slots=True)
class PaperMix:
    """Means and coefficients of variation of the paper's conversations."""

    conversations: int = 2_294
    turns: tuple[int, int] = (2, 5)
    first_tokens: float = a40.INPUT_TOKENS
    first_cv: float = 0.35
    appended_tokens: float = 250.0
    appended_cv: float = 1.0
    output_tokens: float = a40.OUTPUT_TOKENS  # output tokens of a conversation
    output_cv: float = 0.5
    tool_s: float = 0.5
    seed: int = 0


def conversations(mix: PaperMix) -> tuple[TraceConversation, ...]:
    """Return the conversations of a mix, all of which arrive at time 0."""
    random = generators.stream(mix.seed, "paper")
    turn_output = mix.output_tokens * 2 / sum(mix.turns)
    found: list[TraceConversation] = []
    for number in range(mix.conversations):
        count, context, turns = random.randint(*mix.turns), 0, []
        for index in range(count):
            mean, cv = (mix.appended_tokens, mix.appended_cv) if index else (mix.first_tokens, mix.first_cv)
            turn = TraceTurn(
                appended_tokens=generators.tokens(random, mean, cv),
                cached_tokens=context,
                output_tokens=generators.tokens(random, turn_output, mix.output_cv, least=2),
                wait_s=generators.lognormal(random, mix.tool_s, 1.0) if index else 0.0,
                ending=TurnEnding.END_OF_TURN if index == count - 1 else TurnEnding.TOOL_USE,
            )
            context = turn.context_tokens
            turns.append(turn)
        found.append(TraceConversation(f"task-{number:04d}", 0.0, tuple(turns)))
    return tuple(found)


def poisson(found: Sequence[TraceConversation], rate: float, seed: int = 0) -> list[TraceConversation]:
    times = generators.poisson(rate, generators.stream(seed, f"arrivals {rate}"))
    return list(generators.arriving(found, times))


def saturating(found: Sequence[TraceConversation]) -> list[TraceConversation]:
    """Return the conversations with arrivals spaced by prompt cost, so that the prefiller is just full."""
    alone = [prefill_seconds(a40.ENGINE, conversation.turns[0].prompt_tokens) for conversation in found]
    # A busy prefiller packs the end of one prompt and the start of the next into one iteration.
    packed = _drain_seconds(found) / sum(alone)
    at, spaced = 0.0, []
    for conversation, seconds in zip(found, alone, strict=True):
        spaced.append(replace(conversation, arrival_s=at))
        at += seconds * packed
    return spaced


def far_apart(found: Sequence[TraceConversation]) -> Iterator[TraceConversation]:
    """Yield the conversations so far apart that none overlap, which gives unloaded latencies."""
    for number, conversation in enumerate(found):
        yield replace(conversation, arrival_s=number * FAR_APART_S)


def real(path: Path, rate: float) -> list[TraceConversation]:
    """Return recorded conversations with lengths divided by `SHRINK`, cut before a turn that does not fit."""
    try:
        found = load(path).conversations
    except NotATrace:
        found = importers.import_files([path]).conversations
    alone = (replace(conversation, parent=None) for conversation in found if conversation.parent is None)
    fitting = tuple(generators.fit(generators.scale(alone, generators.Scale(lengths=1 / SHRINK)), LONGEST))
    return list(generators.arriving(fitting, generators.poisson(rate, generators.stream(0, "arrivals"))))


def _drain_seconds(found: Sequence[TraceConversation]) -> float:
    """Return how long one engine needs for all first prompts if they are submitted together."""
    events = EventQueue()

    def ignore(engine: SimulatedEngine, live: LiveConversation) -> None:
        return None

    engine = SimulatedEngine("prefiller", a40.ENGINE, events, Pressure.PIN, ignore, ignore)
    for conversation in found:
        live = LiveConversation(conversation, 0, 0.0)
        live.todo = live.turn.prompt_tokens
        engine.submit(live)
    events.run()
    return events.now
