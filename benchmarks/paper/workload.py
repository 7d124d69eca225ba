"""Conversations as the paper describes its traces, and the arrivals it uses.

The paper gives means (15k tokens in, 1k out) and shapes: first turns are between the upper 20 and 30 % of all
turns (section 5.2: 3.3 to 5 turns a conversation), appends of hundreds of tokens (section 3). Conversations
have 2 to 5 turns here. That the paper sees no SLO violation against a single baseline number says that none
of its conversations was several times longer than the baseline one, so outputs spread moderately; the
sensitivity table has a heavy-tailed mix beside it.

How many conversations were played it does not say. All 2,294 tasks of the SWE-bench test set are, here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.paper import a40
from traces import generators
from traces.format import TraceConversation, TraceTurn, TurnEnding
from traces.simulator.engine import EventQueue, SimulatedEngine
from traces.simulator.kv import LiveConversation, Pressure
from traces.simulator.tiers import EngineProfile, prefill_seconds

RATES = (0.5, 0.75, 1.0, 1.25, 1.5)  # paper: Poisson
FAR_APART_S = 10_000.0


@dataclass(frozen=True, slots=True)
class PaperMix:
    conversations: int = 2_294
    turns: tuple[int, int] = (2, 5)
    first_tokens: float = a40.INPUT_TOKENS
    first_cv: float = 0.35
    appended_tokens: float = 250.0
    appended_cv: float = 1.0
    output_tokens: float = a40.OUTPUT_TOKENS  # of a conversation
    output_cv: float = 0.5
    tool_s: float = 0.5
    seed: int = 0


def conversations(mix: PaperMix) -> tuple[TraceConversation, ...]:
    """Without generators."""
    random = generators.stream(mix.seed, "paper")
    a_turn = mix.output_tokens * 2 / sum(mix.turns)
    found: list[TraceConversation] = []
    for number in range(mix.conversations):
        count, context, turns = random.randint(*mix.turns), 0, []
        for index in range(count):
            mean, cv = (mix.appended_tokens, mix.appended_cv) if index else (mix.first_tokens, mix.first_cv)
            turn = TraceTurn(
                appended_tokens=generators.tokens(random, mean, cv),
                cached_tokens=context,
                output_tokens=generators.tokens(random, a_turn, mix.output_cv, least=2),
                wait_s=generators.lognormal(random, mix.tool_s, 1.0) if index else 0.0,
                ending=TurnEnding.END_OF_TURN if index == count - 1 else TurnEnding.TOOL_USE,
            )
            context = turn.context_tokens
            turns.append(turn)
        found.append(TraceConversation(f"task-{number:04d}", 0.0, tuple(turns)))
    return tuple(found)


def poisson(found: Sequence[TraceConversation], rate: float, seed: int = 0) -> list[TraceConversation]:
    return list(
        generators.arriving(found, generators.poisson(rate, generators.stream(seed, f"arrivals {rate}")))
    )


def saturating(found: Sequence[TraceConversation], prefiller: EngineProfile) -> list[TraceConversation]:
    """Spaced so that the prefiller is exactly full: in proportion to each prompt's cost."""
    alone = [prefill_seconds(prefiller, conversation.turns[0].prompt_tokens) for conversation in found]
    # A busy prefiller packs the end of one prompt and the start of the next into one iteration.
    packed = _drain_seconds(found, prefiller) / sum(alone)
    at, spaced = 0.0, []
    for conversation, seconds in zip(found, alone, strict=True):
        spaced.append(replace(conversation, arrival_s=at))
        at += seconds * packed
    return spaced


def far_apart(found: Sequence[TraceConversation]) -> Iterator[TraceConversation]:
    """Nobody meets anybody: the unloaded latencies."""
    for number, conversation in enumerate(found):
        yield replace(conversation, arrival_s=number * FAR_APART_S)


def _drain_seconds(found: Sequence[TraceConversation], prefiller: EngineProfile) -> float:
    events = EventQueue()

    def nothing(engine: SimulatedEngine, live: LiveConversation) -> None:
        return None

    engine = SimulatedEngine("prefiller", prefiller, events, Pressure.PIN, nothing, nothing)
    for conversation in found:
        live = LiveConversation(conversation, 0, 0.0)
        live.todo = live.turn.prompt_tokens
        engine.submit(live)
    events.run()
    return events.now
