"""Measures what a hostile tenant costs another tenant of the same fleet.

    python -m benchmarks.tenants [--quick] [--json FILE] [--fleet FILE] [--seed 0] [--attacks each]

The fleet co-serves, with an API key for each tenant and the same limits for both. The victim's agents hold
conversations on the same engines, alternately alone and beside an attack. The attack consists of floods of
streams, giant prompts, streams that are cut off, bodies that come byte by byte, batches one after another,
and requests that cost the fleet much more than their tokens count: 10 MiB of text to be truncated or counted,
in metadata or in a line of a batch, request ids of 60 kB, beams, the highest priority, expressions of 19 KB,
schemas and tools that are slow to compile, hundreds of answers with log-probabilities or words to avoid, and
log-probabilities of prompts.
Beside the attack, the victim's P99 of the time to first token may be 1.25 times that alone, and its P99 of
the longest gap within a turn 1.5 times. None of its turns may be refused or fail. No engine may take more
than 1.5 times its idle memory, and no request may be answered with 500. By default all kinds of requests come
together: then cheap requests use up the tenant's limits, and most others are refused. `--attacks` plays kinds
apart. All processes share the machine, the attack's client included.
"""

import asyncio
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import orjson

from benchmarks.harness.chats import converse
from benchmarks.harness.fleet import RANDOM, brought_up, changed
from benchmarks.harness.memory_watch import MEMORY_AIM, MemoryOfEngines
from benchmarks.harness.output import command, print_rows, quantile, report
from benchmarks.harness.processes import arrived, spawned
from benchmarks.tenants.hostile import CLIENTS, attack
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import serving
from router.auth.keys import DefaultLimits, hash_secret
from traces import ReplayError
from traces.replay.client import ChatClient, ReplayOptions, text

VICTIM, HOSTILE = "ck-victim", "ck-hostile"
LIMITS = DefaultLimits(requests_per_minute=600, tokens_per_minute=60_000, turns=4, batches=20)
ROUNDS, PHASE_S = 4, 60.0
QUICK_ROUNDS, QUICK_PHASE_S = 2, 25.0
GROWS_S = 5.0  # how long an attack runs before the victim begins
AGENTS, TURNS, TOKENS = 3, 4, 16
PROMPT, APPEND = 1200, 250  # characters
THINKS_S = 0.5
AIM, GAP_AIM = 1.25, 1.5
ATTACKS_HELP = "attacks in turns, such as flood,regex+schema, or `each` kind alone (default: all together)"


@dataclass
class VictimSeen:
    """Times and failures of the victim's turns, alone or beside an attack."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)  # the longest of each turn
    failed: list[str] = field(default_factory=list)


async def talk(chat: ChatClient, random: Random, seen: VictimSeen, seconds: float) -> None:
    """Let the victim's agents hold conversations for `seconds`, and record their turns in `seen`."""
    until = time.monotonic() + seconds

    async def agent() -> None:
        while time.monotonic() < until:
            name = f"victim-{random.getrandbits(60):x}"
            later = (text(f"{name}/{turn}", APPEND) for turn in range(TURNS - 1))
            try:
                async for asked, answer in converse(chat, (text(name, PROMPT), *later), TOKENS):
                    seen.ttft_s.append(answer.first_at - asked)
                    seen.gap_s.append(max((b - a for a, b in pairwise(answer.arrivals)), default=0.0))
                    await asyncio.sleep(random.expovariate(1 / THINKS_S))
            except ReplayError as wrong:
                seen.failed.append(str(wrong))

    await asyncio.gather(*(agent() for _ in range(AGENTS)))


def attacks_of(asked: str) -> list[list[str]]:
    """Return for each attack that `asked` names the kinds of its requests."""
    if asked == "each":
        return [[kind] for kind in CLIENTS]
    attacks = [one.split("+") for one in asked.split(",")]
    if unknown := {kind for one in attacks for kind in one} - CLIENTS.keys():
        raise ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of {', '.join(CLIENTS)}")
    return attacks


def prepared(file: Path, keys: Path) -> FleetSpec:
    rows = [{"id": one, "owner": one[3:], "hash": hash_secret(one)} for one in (VICTIM, HOSTILE)]
    keys.write_bytes(orjson.dumps(rows))
    return changed(
        load_fleet(file),
        name="tenants",
        gateway={"keys_file": str(keys), "key_limits": LIMITS},
        engine={"start_together": 2},
        coserving={"enabled": True, "ttft": 2.0, "tbt": 0.3},
    )


async def play(
    url: str,
    model: str,
    memory: MemoryOfEngines,
    seed: int,
    rounds: int,
    phase_s: float,
    kinds: Sequence[str] = tuple(CLIENTS),
) -> tuple[VictimSeen, VictimSeen, Counter[str]]:
    """Return the victim's measurements alone and during attacks, and counts of the attacks' answers."""
    alone, beside, answers, random = VictimSeen(), VictimSeen(), Counter[str](), Random(seed)
    whole_s = GROWS_S + phase_s + GROWS_S
    looking = asyncio.create_task(memory.run())
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {VICTIM}"}) as session:
        chat = ChatClient(session, ReplayOptions(url, model), model)
        await talk(chat, random, VictimSeen(), GROWS_S)  # engines have seen such turns
        for number in range(rounds):
            await talk(chat, random, alone, phase_s)
            with spawned(attack, url, HOSTILE, model, seed + number, whole_s, kinds) as pipe:
                await asyncio.sleep(GROWS_S)
                await talk(chat, random, beside, phase_s)
                answers += arrived(pipe)
            await asyncio.sleep(GROWS_S)  # what the attack had begun ends
            tails = (quantile(seen.ttft_s, 0.99) for seen in (alone, beside))
            print("round {}: P99 alone {:.3f} s, beside {:.3f} s".format(number, *tails), flush=True)
    looking.cancel()
    return alone, beside, answers


def ratio(beside: list[float], alone: list[float]) -> float:
    """Return the ratio of the P99 of `beside` to that of `alone`."""
    return quantile(beside, 0.99) / p99 if (p99 := quantile(alone, 0.99)) else 0.0


def figures_of(
    alone: VictimSeen, beside: VictimSeen, answers: Counter[str], memory: float
) -> dict[str, float]:
    seen = {"alone": alone, "beside": beside}
    return {
        "victim_ttft_p99_vs_alone": ratio(beside.ttft_s, alone.ttft_s),
        "victim_gap_p99_vs_alone": ratio(beside.gap_s, alone.gap_s),
        "victim_failed": len(beside.failed),
        "victim_failed_alone": len(alone.failed),
        "engine_memory_vs_idle": memory,
        "internal_errors": sum(count for answer, count in answers.items() if answer.endswith(" 500")),
        **{
            f"victim_ttft_p{q}_{name}_s": quantile(one.ttft_s, q / 100)
            for q in (50, 90, 99)
            for name, one in seen.items()
        },
        **{f"victim_turns_{name}": len(one.ttft_s) for name, one in seen.items()},
    }


def main() -> None:
    quick = f"{QUICK_ROUNDS} rounds of {QUICK_PHASE_S:.0f} s"
    parser = command(__doc__, quick, RANDOM, seed=0)
    parser.add_argument("--attacks", type=attacks_of, default="+".join(CLIENTS), help=ATTACKS_HELP)
    options = parser.parse_args()
    rounds, phase_s = (QUICK_ROUNDS, QUICK_PHASE_S) if options.quick else (ROUNDS, PHASE_S)
    rows: list[dict[str, Any]] = []
    all_answers = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="keys-") as folder:
        fleet = prepared(options.fleet, Path(folder) / "keys.yaml")
        with brought_up(fleet) as home:
            url = serving(home).endpoint
            for attack_kinds in options.attacks:
                memory = MemoryOfEngines(home)
                playing = play(url, fleet.model.name, memory, options.seed, rounds, phase_s, attack_kinds)
                alone, beside, answers = asyncio.run(playing)
                if not answers:
                    raise SystemExit("the attack got no processor time: use a quieter machine")
                row = {"attack": "+".join(attack_kinds), **figures_of(alone, beside, answers, memory.most)}
                rows.append(row)
                all_answers += answers
                print(row["attack"], "was answered:", dict(answers.most_common()))
                for line in (*alone.failed, *beside.failed):
                    print(f"  failed: {line[:300]}")
    print_rows("Each attack", rows)
    figures = {name: max(row[name] for row in rows) for name in rows[0] if name != "attack"}
    report(options.json, figures, attack=all_answers, attacks=rows)
    late = figures["victim_ttft_p99_vs_alone"] > AIM or figures["victim_gap_p99_vs_alone"] > GAP_AIM
    grown = figures["engine_memory_vs_idle"] > MEMORY_AIM
    sys.exit(1 if figures["victim_failed"] or figures["internal_errors"] or late or grown else 0)


if __name__ == "__main__":
    main()
