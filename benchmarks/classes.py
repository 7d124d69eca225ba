"""Two SLO classes under overload: what the better one notices of it, and whether the other one is served.

    python -m benchmarks.classes [--quick] [--json FILE] [--fleet FILE] [--seed 0] [--prompt 8000]
        [--tbt 10] [--others-tbt 200] [--phase-s 120]

One engine that co-serves, so that iterations of a lesser class are left when a better one's turn comes; or
another fleet, on no more than two cores one engine of it, for engines that take each other's time are
overloaded by that already. KV suffices: what is short is time. Conversations are of one
kind: turns that call a tool, then one that answers. What the fleet carries of them is measured first. Then
those of the class `better` arrive at a part of that, alone and beside others of the class `default` who want
more than all of it, on the same engines, forwards and back; who is refused comes back when `Retry-After` says
so. A phase lasts longer than a turn may wait, and the next one begins when all of them were answered. TTFET:
from a conversation's arrival to the first token that speaks to the user, the tools left out. Wanted: the
better class's at most 1.25 times that of alone.
"""

import asyncio
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import aiohttp

from benchmarks.live_policies import brought_up
from benchmarks.output import command, quantile, write_json
from deploy.fleet import FleetSpec, load_fleet
from deploy.fleet.schema import SloSpec
from deploy.lifecycle.status import serving
from placement.engines import Role
from router.turn import CLASS_HEADER
from traces import ReplayError
from traces.replay.client import ChatClient, Refused, ReplayOptions, TimedAnswer, text

ROOT = Path(__file__).parents[1]
BETTER, OTHER = "better", "default"
AHEAD_S, WAIT_S = 8.0, 20.0
BETTER_TBT_MS, OTHER_TBT_MS = 10.0, 200.0  # less than a token takes alone; the default of a fleet
BLOCKS = 16_384  # of 32 tokens: more than all that come in a phase hold
TURNS, TOKENS, PROMPT, APPEND = 3, 16, 8_000, 200  # characters, which are tokens of the small model
TOOL_S = 0.3
AT_ONCE, WARM_S, CARRIED_S = 6, 10.0, 20.0
BETTER_LOAD, OTHER_LOAD = 0.3, 1.3  # of what the fleet carries
PHASE_S, QUICK_PHASE_S, DRAIN_S = 120.0, 60.0, 240.0
PHASES, QUICK_PHASES = ("alone", "beside", "beside", "alone"), ("alone", "beside")
AIM = 1.25


@dataclass
class ClassSeen:
    """What one class saw in the phases of one kind."""

    ttfet_s: list[float] = field(default_factory=list)
    first_turn_ttft_s: list[float] = field(default_factory=list)
    later_turn_ttft_s: list[float] = field(default_factory=list)
    tool_turn_tbt_s: list[float] = field(default_factory=list)
    asked: int = 0  # turns
    answered: int = 0
    refused: int = 0  # times
    failed: list[str] = field(default_factory=list)

    def add(self, other: "ClassSeen") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class ClassAgents:
    """Agents of one class."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, prompt: int) -> None:
        self._chat, self._prompt = ChatClient(session, ReplayOptions(url, model), model), prompt

    async def talk(self, name: str, seen: ClassSeen) -> None:
        messages = [{"role": "user", "content": text(name, self._prompt)}]
        waited = 0.0
        for turn in range(TURNS):
            asked = time.monotonic()
            seen.asked += 1
            try:
                answer = await self._ask(messages, seen)
            except ReplayError as wrong:
                seen.failed.append(f"{name} turn {turn + 1}: {wrong}")
                return
            seen.answered += 1
            waited += answer.first_at - asked
            (seen.later_turn_ttft_s if turn else seen.first_turn_ttft_s).append(answer.first_at - asked)
            if turn == TURNS - 1:
                seen.ttfet_s.append(waited)
                return
            waited += answer.last_at - answer.first_at
            seen.tool_turn_tbt_s.append((answer.last_at - answer.first_at) / (TOKENS - 1))
            messages += [{"role": "assistant", "content": answer.text}]
            messages += [{"role": "user", "content": text(f"{name}/{turn}", APPEND)}]
            await asyncio.sleep(TOOL_S)

    async def _ask(self, messages: list[dict[str, str]], seen: ClassSeen) -> TimedAnswer:
        while True:
            try:
                return await self._chat.ask(messages, TOKENS)
            except Refused as refused:
                seen.refused += 1
                await asyncio.sleep(max(0.1, refused.retry_after_s))

    async def arrive(self, name: str, per_s: float, seconds: float, random: Random, seen: ClassSeen) -> float:
        """Poisson arrivals for so long; returns when all are answered, and how long that took."""
        began = time.monotonic()
        at = random.expovariate(per_s)
        async with asyncio.timeout(seconds + DRAIN_S), asyncio.TaskGroup() as group:
            number = 0
            while at < seconds:
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                group.create_task(self.talk(f"{name}-{number}", seen))
                number += 1
                at += random.expovariate(per_s)
        return time.monotonic() - began

    async def carried(self, name: str) -> float:
        """Conversations a second that the fleet gets through, with always so many at once."""
        done: list[float] = []
        began = time.monotonic()

        async def one_after_another(number: int) -> None:
            count = 0
            while time.monotonic() < began + WARM_S + CARRIED_S:
                await self.talk(f"{name}-{number}-{count}", ClassSeen())
                done.append(time.monotonic() - began - WARM_S)
                count += 1

        await asyncio.gather(*(one_after_another(number) for number in range(AT_ONCE)))
        return sum(0 <= at < CARRIED_S for at in done) / CARRIED_S


def prepared(file: Path, cores: int, better_tbt_s: float, other_tbt_s: float) -> FleetSpec:
    fleet = load_fleet(file)
    talks = {"decoder_wait": WAIT_S, "ttl": 40.0, "park_after": 20.0}
    args = {**fleet.engine.args, "num-gpu-blocks-override": BLOCKS, "max-num-seqs": 128}
    env = {**fleet.engine.env, "VLLM_CPU_KVCACHE_SPACE": "5"}
    tiers = [tier.model_copy(update={"replicas": 1}) for tier in fleet.tiers]
    changes = {
        "name": "classes",
        "tiers": tiers,
        "conversation": fleet.conversation.model_copy(update=talks),
        "engine": fleet.engine.model_copy(update={"start_together": 2, "args": args, "env": env}),
        "coserving": fleet.coserving.model_copy(update={"tbt": other_tbt_s}),
        "slos": {OTHER: SloSpec(), BETTER: SloSpec(ahead=AHEAD_S, last_turn_tbt=better_tbt_s)},
    }
    if cores <= 2:
        alone = tiers[-1].model_copy(update={"name": "mixed", "role": Role.MIXED})
        changes |= {"policy": "collocated", "tiers": [alone]}
    return fleet.model_copy(update=changes)


async def play(
    url: str, model: str, seed: int, prompt: int, phases: tuple[str, ...], phase_s: float
) -> tuple[float, dict[str, ClassSeen], ClassSeen]:
    better, other = {phase: ClassSeen() for phase in phases}, ClassSeen()
    ways = [aiohttp.TCPConnector(limit=0) for _ in range(2)]
    async with (
        aiohttp.ClientSession(connector=ways[0]) as plain,
        aiohttp.ClientSession(connector=ways[1], headers={CLASS_HEADER: BETTER}) as named,
    ):
        others, betters = (ClassAgents(one, url, model, prompt) for one in (plain, named))
        carried = await others.carried(f"carried-{seed}")
        print(f"the fleet carries {carried:.2f} conversations a second", flush=True)
        for number, phase in enumerate(phases):
            one, name = ClassSeen(), f"{seed}-{number}"
            arriving = [betters.arrive(f"better-{name}", BETTER_LOAD * carried, phase_s, Random(seed), one)]
            if phase == "beside":
                rate = OTHER_LOAD * carried
                arriving.append(others.arrive(f"other-{name}", rate, phase_s, Random(seed + 1), other))
            took = await asyncio.gather(*arriving)
            better[phase].add(one)
            print(f"{phase}: {told(one)}; all answered after {max(took):.0f} s", flush=True)
            await asyncio.sleep(2)
    return carried, better, other


def told(seen: ClassSeen) -> str:
    def p50(values: list[float]) -> str:
        return f"{median(values or [0.0]):.3f}"

    return (
        f"{len(seen.ttfet_s)} answers, "
        f"TTFET p50 {p50(seen.ttfet_s)} p95 {quantile(seen.ttfet_s, 0.95):.3f} s; "
        f"p50 of first turns' TTFT {p50(seen.first_turn_ttft_s)}, later {p50(seen.later_turn_ttft_s)}, "
        f"TBT {p50(seen.tool_turn_tbt_s)}; refused {seen.refused}, failed {len(seen.failed)}"
    )


def main() -> None:
    parser = command(__doc__, quick=f"two phases of {QUICK_PHASE_S:.0f} s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "co-serving.yaml")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a first turn's")
    parser.add_argument("--tbt", type=float, default=BETTER_TBT_MS, help="ms: the better class's target")
    parser.add_argument("--others-tbt", type=float, default=OTHER_TBT_MS, help="ms: everybody else's")
    parser.add_argument("--phase-s", type=float, default=PHASE_S, help="of arrivals")
    options = parser.parse_args()
    phases, phase_s = (QUICK_PHASES, QUICK_PHASE_S) if options.quick else (PHASES, options.phase_s)
    fleet = prepared(options.fleet, os.cpu_count() or 1, options.tbt / 1e3, options.others_tbt / 1e3)
    with brought_up(fleet) as home:
        url = serving(home).endpoint
        carried, better, other = asyncio.run(
            play(url, fleet.model.name, options.seed, options.prompt, phases, phase_s)
        )
    alone, beside = better["alone"], better["beside"]
    print(f"others: {told(other)}")
    for line in (*alone.failed, *beside.failed, *other.failed):
        print(f"  failed: {line[:300]}")
    figures = {
        "ttfet_p95_vs_alone": quantile(beside.ttfet_s, 0.95) / quantile(alone.ttfet_s, 0.95),
        "ttfet_p50_vs_alone": median(beside.ttfet_s) / median(alone.ttfet_s),
        "other_served": other.answered / max(1, other.asked),
        "other_refused": other.refused,
        "failed": len(alone.failed) + len(beside.failed) + len(other.failed),
        "carried_per_s": carried,
    }
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    table = {"better alone": asdict(alone), "better beside": asdict(beside), "other": asdict(other)}
    write_json(options.json, figures | {"table": table})
    sys.exit(1 if figures["failed"] or figures["ttfet_p95_vs_alone"] > AIM else 0)


if __name__ == "__main__":
    main()
