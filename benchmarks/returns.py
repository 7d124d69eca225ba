"""How much sooner a parked conversation's turn starts if KV is prefetched instead of restored on arrival.

    python -m benchmarks.returns [--turns 3] [--quick] [--json FILE] [--fleet FILE]

Five agents hold more KV than their decoder, so that an agent that waits for a tool is parked on the host.
They return in rounds of a few turns. In rounds of `ahead` they announce how long their tools take; in `early`
they announce more than that, so that they return when their KV has been on its way for a quarter of a second;
in `on_arrival` they announce nothing. The same conversations take all rounds, forwards and back.
The figures compare the time to first token of returning turns, and the time between tokens of a turn that
runs beside them, while all agents are in the same round.

The model `HEAVY` has 131 KB of KV a token and next to no weights, so that a return costs transfer rather than
compute, as it does on a GPU: Llama-3.3-70B moves 33 GB for 100,000 tokens, 0.16 to 0.65 s at 50 GB/s, and
computes 40 appended tokens in 15 ms.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import httpx

from benchmarks.harness.chats import events, words
from benchmarks.harness.fleet import RANDOM, brought_up, changed, samples
from benchmarks.harness.output import command, report
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import serving
from deploy.small_model import ModelShape, make_model
from placement.prefetch_rules import PrefetchRules

AGENTS, TURNS = 5, 3
PLAYS, QUICK_PLAYS = 2, 1  # of all rounds, forwards and back
TOKENS, ANSWER, QUESTION_WORDS, AWAY_S = 2_000, 2, 1, 8.0
BESIDE_TOKENS, WORD_TOKENS = 500, 5
HEAVY = ModelShape(hidden=64, heads=16, kv_heads=16, head_dim=128, intermediate=64, max_context=4_096)
KV_TOKENS = {"decode": 6_144, "prefill": 4_608}  # less than the agents' 10,000
BLOCK, HOST_GIB, HEADROOM = 32, 2.0, 128
LIMIT_S = 300.0
EARLY_S = PrefetchRules().lead_s - 0.25
ANNOUNCED_S = {"on_arrival": 0.0, "ahead": AWAY_S, "early": AWAY_S + EARLY_S}
VARIANTS = tuple(ANNOUNCED_S)


@dataclass
class ReturnRound:
    """Measurements from one round of all agents."""

    variant: str
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # prompt tokens that were not cached


class ReturningAgents:
    """Agents whose conversations go through all rounds, forwards and back."""

    def __init__(self, http: httpx.AsyncClient, model: str, turns: int, name: str) -> None:
        self._http, self._model, self._turns, self._name = http, model, turns, name
        self.rounds = [ReturnRound(variant) for variant in (*VARIANTS, *reversed(VARIANTS))]
        self._in_round: list[ReturnRound | None] = [None] * AGENTS

    async def run(self) -> None:
        """Play all rounds. A failed request ends the run, because all rounds need the same agents."""
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(self._run_beside())
            await asyncio.gather(*[group.create_task(self._agent(number)) for number in range(AGENTS)])
            beside.cancel()
        for number in (*range(AGENTS), "beside"):
            await self._http.delete(f"/v1/conversations/{self._name}-{number}")

    async def _agent(self, number: int) -> None:
        """Take a first turn and one later turn, which do not count, then the turns of all rounds."""
        random = Random(f"{self._name} {number}")
        messages = [{"role": "user", "content": words(random, TOKENS // WORD_TOKENS)}]
        await asyncio.sleep(number * AWAY_S / AGENTS)
        rounds: list[ReturnRound | None] = [None, None]
        rounds += [one for one in self.rounds for _ in range(self._turns)]
        for current, following in zip_longest(rounds, rounds[1:]):
            began, first, text, usage = time.monotonic(), 0.0, "", None
            announced_s = ANNOUNCED_S[following.variant] if following else 0.0
            async for event in self._stream(f"{self._name}-{number}", messages, ANSWER, announced_s):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    first = first or time.monotonic() - began
                    text += choice["delta"].get("content") or ""
            if current and usage:
                current.ttft_s.append(first)
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                current.computed.append(usage["prompt_tokens"] - cached)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": words(random, QUESTION_WORDS)})
            self._in_round[number] = following
            if following or not current:
                await asyncio.sleep(AWAY_S)

    async def _run_beside(self) -> None:
        """Stream one answer after another beside the agents, and record the gaps between its tokens."""
        while True:
            last = 0.0
            messages = [{"role": "user", "content": "on"}]
            async for event in self._stream(f"{self._name}-beside", messages, BESIDE_TOKENS):
                if event["choices"]:
                    now, current = time.monotonic(), self._in_round[0]
                    if last and current and all(one is current for one in self._in_round):
                        current.gaps_s.append(now - last)
                    last = now

    def _stream(
        self, name: str, messages: list[dict[str, str]], tokens: int, announced_s: float = 0.0
    ) -> AsyncIterator[Any]:
        headers = {"x-conversation-id": name}
        if announced_s:
            headers["x-conversation-away"] = f"{announced_s:g}"
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        body |= {"stream_options": {"include_usage": True}}
        body |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        return events(self._http, "/v1/chat/completions", body, headers)


def prepared(file: Path, model: Path) -> FleetSpec:
    fleet = load_fleet(file)
    tiers = [
        changed(
            tier,
            replicas=1,
            args={"num-gpu-blocks-override": KV_TOKENS[tier.role] // BLOCK, "block-size": BLOCK},
        )
        for tier in fleet.tiers
    ]
    return changed(
        fleet,
        name="returns",
        model={"path": str(model), "served_name": "heavy", "max_context": HEAVY.max_context},
        tiers=tiers,
        conversation={"park_after": AWAY_S / 4, "headroom_tokens": HEADROOM},
        engine={"start_together": 2},
        kv={"host_kv_gib": HOST_GIB},
    )


async def play(url: str, model: str, turns: int, times: int) -> list[ReturnRound]:
    rounds = list[ReturnRound]()
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        for number in range(times):
            agents = ReturningAgents(http, model, turns, f"agents-{number}")
            await agents.run()
            rounds += agents.rounds
    return rounds


def figures_of(rounds: Sequence[ReturnRound]) -> dict[str, float | None]:
    """Print each variant's figures, and return ratios to `on_arrival`.

    A ratio of gaps is None if the agents were never all in the same round, as with one turn a round.
    """
    by_variant = {name: [one for one in rounds if one.variant == name] for name in VARIANTS}
    ttft = {name: [value for one in found for value in one.ttft_s] for name, found in by_variant.items()}

    def gaps(statistic: Callable[[list[float]], float], variant: str) -> float | None:
        """Return the ratio of a statistic of the gaps in `variant` to that in `on_arrival`."""
        of = {
            name: [statistic(one.gaps_s) for one in by_variant[name] if one.gaps_s]
            for name in (variant, VARIANTS[0])
        }
        return mean(of[variant]) / mean(of[VARIANTS[0]]) if all(of.values()) else None

    for name, found in by_variant.items():
        computed = median(tokens for one in found for tokens in one.computed)
        medians = ", ".join(f"{1e3 * median(one.gaps_s):.2f}" for one in found if one.gaps_s)
        print(
            f"{name}: TTFT p50 {median(ttft[name]):.3f} ({min(ttft[name]):.3f} to {max(ttft[name]):.3f}) s "
            f"of {len(ttft[name])} turns; {computed:.0f} tokens not cached; TBT p50 by round {medians} ms"
        )
    arrival, ahead, early = VARIANTS
    return {
        "ttft_p50_vs_on_arrival": median(ttft[ahead]) / median(ttft[arrival]),
        "early_ttft_p50_vs_on_arrival": median(ttft[early]) / median(ttft[arrival]),
        "tbt_vs_on_arrival": gaps(median, ahead),
        "tbt_mean_vs_on_arrival": gaps(mean, ahead),
        "early_tbt_vs_on_arrival": gaps(median, early),
    }


def main() -> None:
    parser = command(__doc__, quick="each round twice, not four times", fleet=RANDOM)
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of each agent in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="heavy-") as directory:
        path = Path(directory) / "heavy"
        make_model(path, HEAVY)
        fleet = prepared(options.fleet, path)
        with brought_up(fleet) as home:
            url, plays = serving(home).endpoint, QUICK_PLAYS if options.quick else PLAYS
            rounds = asyncio.run(play(url, fleet.model.name, options.turns, plays))
            prefetched = samples([url], "conserve_restores_ahead_total")
    print("\n".join(f"{name} {value:g}" for name, value in prefetched.items()))
    report(options.json, figures_of(rounds), rounds=rounds)


if __name__ == "__main__":
    main()
