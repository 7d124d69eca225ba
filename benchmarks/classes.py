"""How much an SLO class suffers from the overload of a lower class, and whether the lower class is served.

    python -m benchmarks.classes [--quick] [--json FILE] [--fleet FILE] [--seed 0]

On two cores or fewer the fleet is one engine that co-serves, because several engines would overload the cores
by themselves. There is enough KV, so that only computing time is short. A conversation has turns that call a
tool and one turn that answers. First the fleet's capacity is measured. Then conversations of the class
`better` arrive at a part of this capacity, alone and beside conversations of the class `default`, whose load
exceeds it. Phases are played forwards and back; a refused client comes back after `Retry-After`. TTFET is the
time from a conversation's arrival to the first token of the turn that answers, without tools. The aim: beside
`default`, the TTFET of `better` is at most 1.25 times its TTFET alone.
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import aiohttp

from benchmarks.harness.fleet import CO_SERVING, brought_up, changed
from benchmarks.harness.output import command, quantile, report
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import serving
from placement.engines import Role
from router.gateway.config import SloSettings
from router.gateway.slo_classes import CLASS_HEADER
from traces import ReplayError
from traces.replay.client import ChatClient, Refused, ReplayOptions, TimedAnswer, text

BETTER, OTHER = "better", "default"
AHEAD_S, WAIT_S = 8.0, 20.0
BETTER_TBT_S, OTHER_TBT_S = 0.01, 0.2
BLOCKS = 16_384  # of 32 tokens: more than all conversations of a phase hold
TURNS, TOKENS, PROMPT, APPEND = 3, 16, 8_000, 200  # characters are tokens of the small model
TOOL_S = 0.3
AT_ONCE, WARM_S, CARRIED_S = 6, 10.0, 20.0
BETTER_LOAD, OTHER_LOAD = 0.3, 1.3  # shares of the capacity
PHASE_S, QUICK_PHASE_S, DRAIN_S = 120.0, 60.0, 240.0
PHASES, QUICK_PHASES = ("alone", "beside", "beside", "alone"), ("alone", "beside")
AIM = 1.25


@dataclass
class ClassSeen:
    """Measurements of the turns of one SLO class, from all phases of one kind."""

    ttfet_s: list[float] = field(default_factory=list)
    first_turn_ttft_s: list[float] = field(default_factory=list)
    later_turn_ttft_s: list[float] = field(default_factory=list)
    tool_turn_tbt_s: list[float] = field(default_factory=list)
    asked: int = 0
    answered: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)

    def add(self, other: "ClassSeen") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        def p50(values: list[float]) -> str:
            return f"{median(values or [0.0]):.3f}"

        p95 = quantile(self.ttfet_s, 0.95)
        return (
            f"{len(self.ttfet_s)} answers, TTFET p50 {p50(self.ttfet_s)}, p95 {p95:.3f} s; "
            f"TTFT p50 of first turns {p50(self.first_turn_ttft_s)}, later {p50(self.later_turn_ttft_s)}, "
            f"TBT {p50(self.tool_turn_tbt_s)}; refused {self.refused}, failed {len(self.failed)}"
        )


class ClassAgents:
    """Simulated agents whose turns all have one SLO class."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._chat = ChatClient(session, ReplayOptions(url, model), model)

    async def converse(self, name: str, seen: ClassSeen) -> None:
        messages = [{"role": "user", "content": text(name, PROMPT)}]
        waited = 0.0
        for turn in range(TURNS):
            asked = time.monotonic()
            seen.asked += 1
            try:
                answer = await self._ask(messages, seen)
            except ReplayError as error:
                seen.failed.append(f"{name} turn {turn + 1}: {error}")
                return
            seen.answered += 1
            waited += answer.first_at - asked
            (seen.later_turn_ttft_s if turn else seen.first_turn_ttft_s).append(answer.first_at - asked)
            if turn == TURNS - 1:
                seen.ttfet_s.append(waited)
                return
            waited += answer.last_at - answer.first_at
            seen.tool_turn_tbt_s.append((answer.last_at - answer.first_at) / (TOKENS - 1))
            messages.append({"role": "assistant", "content": answer.text})
            messages.append({"role": "user", "content": text(f"{name}/{turn}", APPEND)})
            await asyncio.sleep(TOOL_S)

    async def _ask(self, messages: list[dict[str, str]], seen: ClassSeen) -> TimedAnswer:
        while True:
            try:
                return await self._chat.ask(messages, TOKENS)
            except Refused as refused:
                seen.refused += 1
                await asyncio.sleep(max(0.1, refused.retry_after_s))

    async def arrive(self, name: str, per_s: float, seconds: float, random: Random, seen: ClassSeen) -> float:
        """Let conversations arrive for `seconds`; return the seconds until all of them are answered."""
        began, at, number = time.monotonic(), random.expovariate(per_s), 0
        async with asyncio.timeout(seconds + DRAIN_S), asyncio.TaskGroup() as group:
            while at < seconds:
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                group.create_task(self.converse(f"{name}-{number}", seen))
                number += 1
                at += random.expovariate(per_s)
        return time.monotonic() - began

    async def capacity(self, name: str) -> float:
        """Return how many conversations per second the fleet serves if `AT_ONCE` run in parallel."""
        done: list[float] = []
        began = time.monotonic()

        async def repeat(number: int) -> None:
            while (now := time.monotonic()) < began + WARM_S + CARRIED_S:
                await self.converse(f"{name}-{number}-{now}", ClassSeen())
                done.append(time.monotonic() - began - WARM_S)

        await asyncio.gather(*(repeat(number) for number in range(AT_ONCE)))
        return sum(0 <= at < CARRIED_S for at in done) / CARRIED_S


def prepared(file: Path, cores: int) -> FleetSpec:
    fleet = load_fleet(file)
    fleet = changed(
        fleet,
        name="classes",
        tiers=[changed(tier, replicas=1) for tier in fleet.tiers],
        conversation={"decoder_wait": WAIT_S, "ttl": 40.0, "park_after": 20.0},
        engine={
            "start_together": 2,
            "args": {"num-gpu-blocks-override": BLOCKS, "max-num-seqs": 128},
            "env": {"VLLM_CPU_KVCACHE_SPACE": "5"},
        },
        coserving={"tbt": OTHER_TBT_S},
    )
    better = SloSettings(queue_weight=AHEAD_S, last_turn_tbt_s=BETTER_TBT_S)
    slos = {OTHER: SloSettings(), BETTER: better}
    fleet = fleet.model_copy(update={"slos": slos})
    if cores > 2:
        return fleet
    return changed(
        fleet, policy="collocated", tiers=[changed(fleet.tiers[-1], name="mixed", role=Role.MIXED)]
    )


async def play(
    url: str, model: str, seed: int, phases: tuple[str, ...], phase_s: float
) -> tuple[float, dict[str, ClassSeen], ClassSeen]:
    """Return the capacity, the higher class's measurements by phase, and those of the lower class."""
    better, other = {phase: ClassSeen() for phase in phases}, ClassSeen()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as plain,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={CLASS_HEADER: BETTER}
        ) as named,
    ):
        others, betters = (ClassAgents(one, url, model) for one in (plain, named))
        capacity = await others.capacity(f"carried-{seed}")
        print(f"the fleet serves {capacity:.2f} conversations a second", flush=True)
        for number, phase in enumerate(phases):
            seen, name, rate = ClassSeen(), f"{seed}-{number}", BETTER_LOAD * capacity
            arriving = [betters.arrive(f"better-{name}", rate, phase_s, Random(seed), seen)]
            if phase == "beside":
                rate = OTHER_LOAD * capacity
                arriving.append(others.arrive(f"other-{name}", rate, phase_s, Random(seed + 1), other))
            took = max(await asyncio.gather(*arriving))
            better[phase].add(seen)
            print(f"{phase}: {seen}; all answered after {took:.0f} s", flush=True)
            await asyncio.sleep(2)
    return capacity, better, other


def main() -> None:
    quick = f"two phases of {QUICK_PHASE_S:.0f} s"
    options = command(__doc__, quick, CO_SERVING, seed=0).parse_args()
    phases, phase_s = (QUICK_PHASES, QUICK_PHASE_S) if options.quick else (PHASES, PHASE_S)
    fleet = prepared(options.fleet, os.cpu_count() or 1)
    with brought_up(fleet) as home:
        url = serving(home).endpoint
        capacity, better, other = asyncio.run(play(url, fleet.model.name, options.seed, phases, phase_s))
    alone, beside = better["alone"], better["beside"]
    print(f"others: {other}")
    failed = (*alone.failed, *beside.failed, *other.failed)
    for line in failed:
        print(f"  failed: {line[:300]}")
    figures = {
        "ttfet_p95_vs_alone": quantile(beside.ttfet_s, 0.95) / quantile(alone.ttfet_s, 0.95),
        "ttfet_p50_vs_alone": median(beside.ttfet_s) / median(alone.ttfet_s),
        "other_served": other.answered / max(1, other.asked),
        "other_refused": other.refused,
        "failed": len(failed),
        "carried_per_s": capacity,
    }
    report(options.json, figures, table={"better alone": alone, "better beside": beside, "other": other})
    sys.exit(1 if failed or figures["ttfet_p95_vs_alone"] > AIM else 0)


if __name__ == "__main__":
    main()
