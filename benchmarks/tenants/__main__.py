"""Two tenants on one fleet, one of them hostile: what the other one notices.

    python -m benchmarks.tenants [--quick] [--json FILE] [--fleet FILE] [--seed 0]

The fleet is brought up for it, with co-serving, a key for each tenant and the same limits for both. The
victim's agents hold conversations, in turns alone and beside an attack, on the same engines: floods of
streams, giant prompts, streams that are cut off, bodies that come byte by byte, batches one after another,
and requests that would cost more than they weigh: 10 MiB of text to be cut or counted, or in a line of a
batch, request ids of 60 kB, beams, the highest priority. Wanted: the victim's P99 of the time to the first
token of its turns at most 1.25 times that of alone, that of the longest gap within a turn at most 1.5 times,
and no turn of it refused or failed. Everything shares the machine, the attack's client too.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random

import aiohttp
import orjson

from benchmarks.harness.fleet import brought_up
from benchmarks.harness.output import command, quantile, write_json
from benchmarks.tenants.hostile import attack
from deploy.fleet import FleetSpec, load_fleet
from deploy.fleet.schema import KeyLimitsSpec
from deploy.lifecycle.status import serving
from router.auth.keys import hash_secret
from traces import ReplayError
from traces.replay.client import ChatClient, ReplayOptions, text

ROOT = Path(__file__).parents[2]
VICTIM, HOSTILE = "ck-victim", "ck-hostile"
LIMITS = KeyLimitsSpec(requests_per_minute=600, tokens_per_minute=60_000, turns=4, batches=20)
ROUNDS, PHASE_S = 4, 60.0
QUICK_ROUNDS, QUICK_PHASE_S = 2, 25.0
GROWS_S = 5.0  # of an attack, before the victim begins
AGENTS, TURNS, TOKENS = 3, 4, 16
PROMPT, APPEND = 1200, 250  # characters
THINKS_S = 0.5
AIM, GAP_AIM = 1.25, 1.5


@dataclass
class VictimSeen:
    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)  # the longest of each turn
    failed: list[str] = field(default_factory=list)


class Victim:
    def __init__(self, chat: ChatClient, seed: int) -> None:
        self._chat, self._random = chat, Random(seed)

    async def talk(self, seen: VictimSeen, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(AGENTS):
                group.create_task(self._agent(seen, until))

    async def _agent(self, seen: VictimSeen, until: float) -> None:
        while time.monotonic() < until:
            name = f"victim-{self._random.getrandbits(60):x}"
            messages = [{"role": "user", "content": text(name, PROMPT)}]
            for turn in range(TURNS):
                asked = time.monotonic()
                try:
                    answer = await self._chat.ask(messages, TOKENS)
                except ReplayError as wrong:
                    seen.failed.append(str(wrong))
                    break
                seen.ttft_s.append(answer.first_at - asked)
                seen.gap_s.append(max((b - a for a, b in pairwise(answer.arrivals)), default=0.0))
                messages += [{"role": "assistant", "content": answer.text}]
                messages += [{"role": "user", "content": text(f"{name}/{turn}", APPEND)}]
                await asyncio.sleep(self._random.expovariate(1 / THINKS_S))


def prepared(file: Path, keys: Path) -> FleetSpec:
    fleet = load_fleet(file)
    keys.write_bytes(
        orjson.dumps([{"id": one, "owner": one[3:], "hash": hash_secret(one)} for one in (VICTIM, HOSTILE)])
    )
    gateway = fleet.gateway.model_copy(update={"keys_file": str(keys), "key_limits": LIMITS})
    engine = fleet.engine.model_copy(update={"start_together": 2})
    coserving = fleet.coserving.model_copy(update={"enabled": True, "ttft": 2.0, "tbt": 0.3})
    changed = {"name": "tenants", "gateway": gateway, "engine": engine, "coserving": coserving}
    return fleet.model_copy(update=changed)


async def play(
    url: str, model: str, seed: int, rounds: int, phase_s: float
) -> tuple[VictimSeen, VictimSeen, Counter[str]]:
    alone, beside, answers = VictimSeen(), VictimSeen(), Counter[str]()
    processes = get_context("spawn")
    results = processes.Queue()
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {VICTIM}"}) as session:
        victim = Victim(ChatClient(session, ReplayOptions(url, model), model), seed)
        await victim.talk(VictimSeen(), GROWS_S)  # engines have seen such turns
        for number in range(rounds):
            await victim.talk(alone, phase_s)
            whole_s = GROWS_S + phase_s + GROWS_S
            attacking = processes.Process(
                target=attack, args=(url, HOSTILE, model, seed + number, whole_s, results), daemon=True
            )
            attacking.start()
            await asyncio.sleep(GROWS_S)
            await victim.talk(beside, phase_s)
            answers += await asyncio.to_thread(results.get, timeout=whole_s + 60)
            attacking.join(10)
            await asyncio.sleep(GROWS_S)  # what it had begun ends
            tails = (quantile(seen.ttft_s, 0.99) for seen in (alone, beside))
            print("round {}: P99 alone {:.3f} s, beside {:.3f} s".format(number, *tails), flush=True)
    return alone, beside, answers


def ratio(beside: list[float], alone: list[float]) -> float:
    """Return how the P99 of one compares with that of the other."""
    return quantile(beside, 0.99) / p99 if (p99 := quantile(alone, 0.99)) else 0.0


def main() -> None:
    parser = command(__doc__, quick=f"{QUICK_ROUNDS} rounds of {QUICK_PHASE_S:.0f} s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "random.yaml")
    options = parser.parse_args()
    rounds, phase_s = (QUICK_ROUNDS, QUICK_PHASE_S) if options.quick else (ROUNDS, PHASE_S)
    with tempfile.TemporaryDirectory(prefix="keys-") as folder:
        fleet = prepared(options.fleet, Path(folder) / "keys.yaml")
        with brought_up(fleet) as home:
            url = serving(home).endpoint
            alone, beside, answers = asyncio.run(play(url, fleet.model.name, options.seed, rounds, phase_s))
    figures = {
        "victim_ttft_p99_vs_alone": ratio(beside.ttft_s, alone.ttft_s),
        "victim_gap_p99_vs_alone": ratio(beside.gap_s, alone.gap_s),
        "victim_failed": len(beside.failed),
        "victim_failed_alone": len(alone.failed),
        **{f"victim_ttft_p{q}_{name}_s": quantile(seen.ttft_s, q / 100)
           for q in (50, 90, 99) for name, seen in (("alone", alone), ("beside", beside))},
        "victim_turns_alone": len(alone.ttft_s),
        "victim_turns_beside": len(beside.ttft_s),
    }  # fmt: skip
    print("answers to the attack:", dict(answers.most_common()))
    for line in (*alone.failed, *beside.failed):
        print(f"  failed: {line[:300]}")
    for name, value in figures.items():
        print(f"{name} = {value if isinstance(value, int) else round(value, 3)}")
    write_json(options.json, figures | {"attack": answers})
    late = figures["victim_ttft_p99_vs_alone"] > AIM or figures["victim_gap_p99_vs_alone"] > GAP_AIM
    sys.exit(1 if figures["victim_failed"] or late else 0)


if __name__ == "__main__":
    main()
