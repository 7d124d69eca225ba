"""Two SLO classes on one engine, on a computed clock: what the better one notices of the other's overload.

    python -m benchmarks.coserving.classes [--quick] [--seeds 3] [--json FILE]

The policy of an engine without co-serving, Llama 8B on one H100 (`simulated.py`), and conversations of real
agents (the shipped sample) up to the turn that speaks to the user. What the engine carries of them is
computed first. Then those of the better class arrive at 0.3 of that, alone and beside others at 1.3 of it;
all are played to their end. KV suffices, and is kept between turns. TTFET: from a conversation's arrival to
the first token of its last turn, the tools left out. The same on real vLLM, on cores that also run everything
else: `benchmarks.classes`.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.coserving.engine import SimulatedCoServing, SimulatedRequest, SimulatedShape
from benchmarks.coserving.load import quantile
from benchmarks.coserving.simulated import H100
from benchmarks.output import command, write_json
from placement.iteration.interface import ServingSettings, TurnTargets
from placement.iteration.policies import make_policy
from traces.format import TraceConversation, load

SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "agents.jsonl.gz"
BETTER, OTHER = "better", "other"
AHEAD_S = {BETTER: 8.0, OTHER: 0.0}
TARGETS = {BETTER: TurnTargets(2.0, 0.02), OTHER: TurnTargets(2.0, 0.05)}
LOAD = {BETTER: 0.3, OTHER: 1.3}  # of what the engine carries
LONGEST_WAIT_S = 5.0  # between turns: whoever goes to lunch asks for nothing
AT_ONCE, CARRIED_S = 24, 300.0
PHASE_S, QUICK_PHASE_S = 400.0, 100.0
SHAPE = SimulatedShape(blocks=1 << 24, max_running=128)


@dataclass
class ClassOutcome:
    """Of one class."""

    ttfet_s: list[float] = field(default_factory=list)
    first_ttft_s: list[float] = field(default_factory=list)
    later_ttft_s: list[float] = field(default_factory=list)
    began: int = 0
    ended: int = 0


class AgentConversations:
    """Conversations on one engine, each turn after the end of the one before it and its tool."""

    def __init__(self, conversations: tuple[TraceConversation, ...]) -> None:
        self._conversations = conversations
        self._talking: dict[str, tuple[TraceConversation, str, int, float]] = {}  # class, turn, time so far
        self._ids = itertools.count()
        self.seen = {BETTER: ClassOutcome(), OTHER: ClassOutcome()}
        self.ended_at: list[float] = []

    def begin(self, which: int, of: str, at: float) -> SimulatedRequest:
        key = f"{of}-{next(self._ids)}"
        conversation = self._conversations[which % len(self._conversations)]
        self._talking[key] = conversation, of, 0, 0.0
        self.seen[of].began += 1
        return self._asks(key, at)

    def _asks(self, key: str, at: float) -> SimulatedRequest:
        conversation, of, number, _ = self._talking[key]
        turn = conversation.turns[number]
        has = min(turn.cached_tokens if number else 0, turn.prompt_tokens - 1)
        return SimulatedRequest(
            key, at, turn.prompt_tokens, max(turn.output_tokens, 1), slo=TARGETS[of], ahead_s=AHEAD_S[of],
            computed=has, furthest=has,
        )  # fmt: skip

    def follows(self, ended: SimulatedRequest) -> SimulatedRequest | None:
        conversation, of, number, so_far_s = self._talking[ended.key]
        first, last, seen = ended.tokens_at[0], ended.tokens_at[-1], self.seen[of]
        (seen.later_ttft_s if number else seen.first_ttft_s).append(first - ended.arrival)
        if number == conversation.effective_turn:
            seen.ttfet_s.append(so_far_s + first - ended.arrival)
            del self._talking[ended.key]
            seen.ended += 1
            self.ended_at.append(last)
            return None
        self._talking[ended.key] = conversation, of, number + 1, so_far_s + last - ended.arrival
        return self._asks(ended.key, last + min(conversation.turns[number + 1].wait_s, LONGEST_WAIT_S))


def engine() -> SimulatedCoServing:
    return SimulatedCoServing(make_policy(ServingSettings("prompts_in_order", TARGETS[OTHER])), SHAPE, H100)


def carried(conversations: tuple[TraceConversation, ...], seconds: float) -> float:
    """Conversations a second, with always so many at once; a third of the time is for getting there."""
    agents, one, which = AgentConversations(conversations), engine(), itertools.count()

    def follows(ended: SimulatedRequest) -> SimulatedRequest | None:
        return agents.follows(ended) or agents.begin(next(which), OTHER, ended.tokens_at[-1])

    one.run([agents.begin(next(which), OTHER, 0.0) for _ in range(AT_ONCE)], seconds, follows=follows)
    return sum(at > seconds / 3 for at in agents.ended_at) / (seconds * 2 / 3)


def arrivals(rate: float, seconds: float, seed: str) -> Iterator[tuple[int, float]]:
    """Which conversation of the sample, and when."""
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        yield rng.randrange(1 << 16), at


def phase(
    conversations: tuple[TraceConversation, ...],
    rate: float,
    seconds: float,
    seed: int,
    classes: tuple[str, ...],
) -> dict[str, ClassOutcome]:
    agents = AgentConversations(conversations)
    coming = [
        agents.begin(which, of, at)
        for of in classes
        for which, at in arrivals(LOAD[of] * rate, seconds, f"{seed}/{of}")
    ]
    engine().run(coming, 20 * seconds, follows=agents.follows)
    return agents.seen


def row_of(seed: int, alone: ClassOutcome, beside: ClassOutcome, other: ClassOutcome) -> dict[str, Any]:
    def ratio(figure: str, share: float) -> float:
        return quantile(getattr(beside, figure), share) / quantile(getattr(alone, figure), share)

    return {
        "seed": seed, "conversations": alone.began,
        "ttfet_p95_alone_s": quantile(alone.ttfet_s, 0.95), "ttfet_p95_vs_alone": ratio("ttfet_s", 0.95),
        "ttfet_p50_vs_alone": ratio("ttfet_s", 0.5), "first_ttft_p95_vs_alone": ratio("first_ttft_s", 0.95),
        "later_ttft_p50_vs_alone": ratio("later_ttft_s", 0.5),
        "other_ttfet_p95_s": quantile(other.ttfet_s, 0.95), "other_served": other.ended / max(1, other.began),
    }  # fmt: skip


def main() -> None:
    parser = command(__doc__, quick=f"{QUICK_PHASE_S:.0f} s of arrivals instead of {PHASE_S:.0f}")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    seconds = QUICK_PHASE_S if arguments.quick else PHASE_S
    conversations = load(SAMPLE).conversations
    rate = carried(conversations, CARRIED_S)
    print(f"the engine carries {rate:.3f} conversations a second", flush=True)
    rows = []
    for seed in range(arguments.seeds):
        alone = phase(conversations, rate, seconds, seed, (BETTER,))[BETTER]
        both = phase(conversations, rate, seconds, seed, (BETTER, OTHER))
        rows.append(row_of(seed, alone, both[BETTER], both[OTHER]))
        print("  ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True)
    names = ("ttfet_p95_vs_alone", "ttfet_p50_vs_alone", "other_served")
    figures = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    write_json(arguments.json, {**figures, "carried_per_s": rate, "rows": rows})


if __name__ == "__main__":
    main()
