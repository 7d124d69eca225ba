"""Two SLO classes on one engine, on a computed clock: what the better one notices of the other's overload.

    python -m benchmarks.coserving.classes [--quick] [--seeds 3] [--tbt-ms 9.5] [--json FILE]

The policy of an engine without co-serving, Llama 8B on one H100 (`simulated.py`), and conversations with a
tool: a long first prompt, turns that call the tool, one that speaks to the user. What the engine carries of
them is computed first. Then those of the better class arrive at 0.3 of that, alone and beside others at 1.3
of it; all are played to their end. KV suffices, and is kept between turns. TTFET: from a conversation's
arrival to the first token of its last turn, the tools left out. The same on real vLLM, on cores that also run
everything else: `benchmarks.classes`.

Beside a better class's tokens lesser ones have what its target between tokens leaves (`--tbt-ms`; alone a
token takes 8 ms here): so much longer its turns take, and so much less waits of the others'.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.coserving.engine import SimulatedCoServing, SimulatedRequest, SimulatedShape
from benchmarks.coserving.simulated import H100
from benchmarks.output import command, quantile, write_json
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.policy_registry import make_policy

BETTER, OTHER = "better", "other"
AHEAD_S = {BETTER: 8.0, OTHER: 0.0}
OTHERS_TARGETS = TurnTargets(2.0, 0.05)
LOAD = {BETTER: 0.3, OTHER: 1.3}  # of what the engine carries
TURNS, FIRST, APPEND, OUTPUT = 4, 8_000, 800, 120  # tokens, half to one and a half times as many
TOOL_S = 2.0
AT_ONCE, CARRIED_S = 16, 120.0
PHASE_S, QUICK_PHASE_S = 240.0, 60.0
SHAPE = SimulatedShape(blocks=1 << 24, max_running=128)


@dataclass
class ClassFigures:
    """Of one class."""

    ttfet_s: list[float] = field(default_factory=list)
    first_ttft_s: list[float] = field(default_factory=list)
    later_ttft_s: list[float] = field(default_factory=list)
    began: int = 0
    ended: int = 0


@dataclass(frozen=True)
class TwoClassTalk:
    """A conversation: tokens that each turn appends, and answers with."""

    of: str
    turns: tuple[tuple[int, int], ...]

    @classmethod
    def random(cls, of: str, rng: random.Random) -> "TwoClassTalk":
        def about(tokens: int) -> int:
            return rng.randint(tokens // 2, tokens * 3 // 2)

        return cls(of, tuple((about(APPEND if turn else FIRST), about(OUTPUT)) for turn in range(TURNS)))


class TwoClassAgents:
    """Conversations on one engine, each turn after the end of the one before it and its tool."""

    def __init__(self, tbt_s: float) -> None:
        self._targets = {BETTER: TurnTargets(2.0, tbt_s), OTHER: OTHERS_TARGETS}
        self._talking: dict[str, tuple[TwoClassTalk, int, int, float]] = {}  # turn, context, time so far
        self._ids = itertools.count()
        self.seen = {BETTER: ClassFigures(), OTHER: ClassFigures()}
        self.ended_at: list[float] = []

    def begin(self, talk: TwoClassTalk, at: float) -> SimulatedRequest:
        key = f"{talk.of}-{next(self._ids)}"
        self._talking[key] = talk, 0, 0, 0.0
        self.seen[talk.of].began += 1
        return self._asks(key, at)

    def _asks(self, key: str, at: float) -> SimulatedRequest:
        talk, number, context, _ = self._talking[key]
        append, output = talk.turns[number]
        return SimulatedRequest(
            key, at, context + append, output, slo=self._targets[talk.of], ahead_s=AHEAD_S[talk.of],
            computed=context, furthest=context,
        )  # fmt: skip

    def follows(self, ended: SimulatedRequest) -> SimulatedRequest | None:
        talk, number, _, so_far_s = self._talking[ended.key]
        first, last, seen = ended.tokens_at[0], ended.tokens_at[-1], self.seen[talk.of]
        (seen.later_ttft_s if number else seen.first_ttft_s).append(first - ended.arrival)
        if number + 1 == len(talk.turns):
            seen.ttfet_s.append(so_far_s + first - ended.arrival)
            del self._talking[ended.key]
            seen.ended += 1
            self.ended_at.append(last)
            return None
        context = ended.prompt + ended.output - 1  # the last token's KV is the next turn's to compute
        self._talking[ended.key] = talk, number + 1, context, so_far_s + last - ended.arrival
        return self._asks(ended.key, last + TOOL_S)


@dataclass(frozen=True)
class ClassesEngine:
    """The engine of a run."""

    policy: str

    def __call__(self) -> SimulatedCoServing:
        return SimulatedCoServing(make_policy(ServingSettings(self.policy, OTHERS_TARGETS)), SHAPE, H100)


def carried(seconds: float, engine: ClassesEngine) -> float:
    """Conversations a second, with always so many at once; a third of the time is for getting there."""
    agents, one, rng = TwoClassAgents(1.0), engine(), random.Random(1)

    def follows(ended: SimulatedRequest) -> SimulatedRequest | None:
        later = agents.follows(ended)
        return later or agents.begin(TwoClassTalk.random(OTHER, rng), ended.tokens_at[-1])

    one.run(
        [agents.begin(TwoClassTalk.random(OTHER, rng), 0.0) for _ in range(AT_ONCE)], seconds, follows=follows
    )
    return sum(at > seconds / 3 for at in agents.ended_at) / (seconds * 2 / 3)


def arrivals(of: str, rate: float, seconds: float, seed: int) -> Iterator[tuple[TwoClassTalk, float]]:
    rng, at = random.Random(f"{seed}/{of}"), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        yield TwoClassTalk.random(of, rng), at


def phase(
    rate: float, seconds: float, seed: int, classes: tuple[str, ...], tbt_s: float, engine: ClassesEngine
) -> dict[str, ClassFigures]:
    agents = TwoClassAgents(tbt_s)
    coming = [
        agents.begin(talk, at) for of in classes for talk, at in arrivals(of, LOAD[of] * rate, seconds, seed)
    ]
    engine().run(coming, 20 * seconds, follows=agents.follows)
    return agents.seen


def row_of(seed: int, alone: ClassFigures, beside: ClassFigures, other: ClassFigures) -> dict[str, Any]:
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
    parser.add_argument("--tbt-ms", type=float, default=9.5, help="the better class's target")
    parser.add_argument(
        "--policy",
        choices=("prompts_in_order", "conserve"),
        default="prompts_in_order",
        help="of an engine without co-serving, or with it: there iterations yield to a better class",
    )
    arguments = parser.parse_args()
    tbt_s = arguments.tbt_ms / 1000
    seconds = QUICK_PHASE_S if arguments.quick else PHASE_S
    engine = ClassesEngine(arguments.policy)
    rate = carried(CARRIED_S, engine)
    print(f"the engine carries {rate:.3f} conversations a second", flush=True)
    rows = []
    for seed in range(arguments.seeds):
        alone = phase(rate, seconds, seed, (BETTER,), tbt_s, engine)[BETTER]
        both = phase(rate, seconds, seed, (BETTER, OTHER), tbt_s, engine)
        rows.append(row_of(seed, alone, both[BETTER], both[OTHER]))
        print("  ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True)
    names = ("ttfet_p95_vs_alone", "ttfet_p50_vs_alone", "other_served")
    figures = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    write_json(arguments.json, {**figures, "carried_per_s": rate, "rows": rows})


if __name__ == "__main__":
    main()
