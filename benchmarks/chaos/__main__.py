"""Random faults while agents hold conversations: is anything lost, wrong, stuck or left behind?

    python -m benchmarks.chaos [--minutes 60] [--seed 0] [--quick] [--json FILE] [--fleet FILE] [--set-clock]
        [--logs FOLDER]
    python -m benchmarks.chaos --drop [--conversations 200] [--minutes 60] [--seed 0] [--json FILE]

The fleet co-serves a batch and parks conversations after seconds. Any process but Ray's supervisor is killed;
engines, keepers, gateways and the directory are stopped for a while, or their traffic is delayed; the
directory, gateways and the batch process cannot write for a while, as with a full disk. An engine is hit only
while all engines serve. With --set-clock, for a machine that nobody else uses, the machine's clock is set an
hour forward or back for a while. No conversation may be lost, no token wrong (float32, greedy, cut streams
included), no request may outlive its limit, nothing may stay behind, and every line of the batch must be
answered once.

With --drop decoders have so little KV that they share their layers again and again (`overload: {policy:
drop}`), and restore them when all agents rest; their processes are killed meanwhile, and clients leave
streams and ask again.

Without --drop, steady clients beside the agents measure `unavailable_s`: for each kind of killed process, the
longest wait of a new conversation, a bound turn or a stream until the next fault, minus the longest wait
before all faults. Kills during a lasting fault do not count. The command fails if a wait exceeds the budget
of `benchmarks.availability` by more than --allowed-s, because waits are longer under the agents' load.
"""

import asyncio
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

from benchmarks import overload
from benchmarks.availability import PROCESSES
from benchmarks.chaos.agents import AgentLengths, Agents
from benchmarks.chaos.faults import Fault, faults, inflict
from benchmarks.chaos.watching import AbortedIterations, Batch, layer_changes, settled, whole
from benchmarks.harness.fleet import RANDOM, brought_up, changed
from benchmarks.harness.output import command, report
from benchmarks.harness.steady_clients import SteadyClients
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import marked
from deploy.lifecycle.status import serving

MINUTES, QUICK_MINUTES = 60.0, 3.0
AT_ONCE = 4  # most faults at a time
PARK_AFTER_S, TTL_S, SETTLE_S = 3.0, 90.0, 30.0
QUIET_S = 10.0  # time before the first fault
ALLOWED_S = 5.0  # how far a wait may exceed its budget
TTFT_S, AGEING_S = 0.02, 20.0  # the target is so short that turns abort iterations with offline work
DROP_CONVERSATIONS, DROP_BLOCKS = 200, 96  # blocks of 32 tokens on each decoder
DROP_LENGTHS = AgentLengths(
    *((40, 60, 80), (96, 160, 200), (0.0, 0.0, 0.0, 6.0)), hang_ups=0.1, busy_s=25.0, rest_s=10.0, apart=True
)


@dataclass(frozen=True)
class Pace:
    """Number of agents, and the shortest and mean time between faults."""

    agents: int
    least_s: float
    every_s: float


PACE = Pace(agents=6, least_s=0.0, every_s=12.0)
# A request that was running on two engines when they ended is refused for minutes. To avoid that, the second
# engine is left alone until the requests that it took over have ended.
DROP_PACE = Pace(agents=16, least_s=60.0, every_s=20.0)


@dataclass
class FaultRun:
    """Inflicts random faults during a run, and counts them."""

    home: FleetHome
    random: Random
    coming: Iterator[Fault]
    pace: Pace
    counts: Counter[str] = field(default_factory=Counter)
    begun: list[tuple[float, Fault]] = field(default_factory=list)  # faults with their start times, in order
    over: Event = field(default_factory=Event)

    def run(self, until: float) -> None:
        """Inflict faults until the given time. A fault that lasts may overlap with later faults."""
        lasting = []
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while (left := until - time.monotonic()) > 0:
                pause_s = self.pace.least_s + self.random.expovariate(1 / self.pace.every_s)
                if self.over.wait(min(left, pause_s)):
                    break
                fault = next(self.coming)
                if not fault.on_an_engine or whole(self.home):
                    lasting.append(threads.submit(self._inflict, fault))
        for one in lasting:
            one.result()

    def _inflict(self, fault: Fault) -> None:
        self.begun.append((time.monotonic(), fault))
        pid = inflict(self.home, fault, self.random)
        if pid:
            self.counts[f"{fault.kind} {fault.victim}"] += 1
            print(f"  {time.strftime('%H:%M:%S')} {fault} (pid {pid})", flush=True)


def prepared(file: Path) -> FleetSpec:
    return changed(
        load_fleet(file),
        name="chaos",
        conversation={"park_after": PARK_AFTER_S, "ttl": TTL_S},
        coserving={"enabled": True, "ttft": TTFT_S, "tbt": 0.3, "ageing": AGEING_S},
        engine={"start_together": 2},
    )


def prepared_to_drop() -> FleetSpec:
    return changed(
        overload.prepared("drop"),
        name="chaos",
        conversation={"park_after": PARK_AFTER_S, "ttl": TTL_S, "decoder_wait": 60.0},
        coserving={"enabled": True, "ttft": TTFT_S, "ageing": AGEING_S},
        engine={"args": {"num-gpu-blocks-override": DROP_BLOCKS}},
    )


def unavailable_s(
    clients: SteadyClients, begun: Iterable[tuple[float, Fault]], quiet: tuple[float, float], over: float
) -> dict[str, dict[str, float]]:
    """Return how much longer clients waited after kills than in quiet times, by killed process and client."""
    undisturbed = {kind: end - begin for kind, (begin, end) in clients.longest_waits(*quiet).items()}
    faults_, found = sorted(begun, key=lambda one: one[0]), dict[str, dict[str, float]]()
    lasts_until = 0.0
    for (at, fault), (until, _) in pairwise([*faults_, (over, None)]):
        alone = at >= lasts_until
        lasts_until = max(lasts_until, at + fault.seconds if fault is not None else at)
        if fault is None or fault.kind != "kill" or not alone:
            continue
        worst = found.setdefault(fault.victim, dict.fromkeys(undisturbed, 0.0))
        for kind, (begin, end) in clients.longest_waits(at, until, beyond=False).items():
            worst[kind] = max(worst[kind], round(end - begin - undisturbed[kind], 3))
    return found


def over_budget(unavailable: dict[str, dict[str, float]], allowed_s: float) -> list[str]:
    """Return a sentence for each wait that exceeds the killed process's budget by more than `allowed_s`."""
    budgets = {one.command: one.budget_s for one in reversed(PROCESSES)}  # the first entry of a command wins
    return [
        f"a client ({kind}) waited {wait_s:.1f} s after kill {victim}; its budget is {budget_s:.1f} s"
        for victim, waits in unavailable.items()
        for kind, wait_s in waits.items()
        if (budget_s := budgets.get(victim, {}).get(kind)) is not None and wait_s > budget_s + allowed_s
    ]


async def play(
    agents: Agents,
    batch: Batch,
    faulty: FaultRun,
    aborted: AbortedIterations,
    clients: SteadyClients | None,
    seconds: float,
    most: float,
) -> dict[str, dict[str, float]]:
    """Let agents talk while faults happen; return how much longer steady clients waited after kills."""
    await agents.learn()
    await asyncio.to_thread(batch.learn)
    await asyncio.to_thread(batch.submit)
    asking, quiet_since = None, time.monotonic()
    if clients is not None:
        asking = asyncio.create_task(clients.run())
        await clients.all_answered()
        quiet_since = time.monotonic()
        await asyncio.sleep(QUIET_S)
    print("answers are known; faults begin", flush=True)
    quiet = quiet_since, time.monotonic()
    until = time.monotonic() + seconds
    inflicting = asyncio.create_task(asyncio.to_thread(faulty.run, until))
    looking = asyncio.create_task(aborted.run())
    try:
        await agents.run(faulty.pace.agents, until, most)
    finally:
        looking.cancel()
        faulty.over.set()
        await inflicting
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    return unavailable_s(clients, faulty.begun, quiet, time.monotonic()) if clients is not None else {}


def main() -> None:
    parser = command(__doc__, f"{QUICK_MINUTES:.0f} minutes", RANDOM, seed=0)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--set-clock", action="store_true", help="also set this machine's clock")
    parser.add_argument("--drop", action="store_true", help="run on decoders that drop layers for KV")
    parser.add_argument("--conversations", type=int, help=f"number to begin (--drop: {DROP_CONVERSATIONS})")
    parser.add_argument(
        "--allowed-s", type=float, default=ALLOWED_S, help="seconds that a wait may exceed its budget"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="copy the logs of the fleet here")
    options = parser.parse_args()
    random, drop = Random(options.seed), options.drop
    fleet = prepared_to_drop() if drop else prepared(options.fleet)
    coming = faults(random, clock=options.set_clock, only_engines=drop)
    most = options.conversations or (DROP_CONVERSATIONS if drop else float("inf"))
    minutes = QUICK_MINUTES if options.quick else options.minutes
    with brought_up(fleet) as home:
        url, model = serving(home).endpoint, fleet.model.name
        agents = Agents(url, model, options.seed, DROP_LENGTHS if drop else None)
        batch, aborted = Batch(url, model), AbortedIterations(home)
        faulty = FaultRun(home, random, coming, DROP_PACE if drop else PACE)
        before = len(marked(home))
        clients = None if drop else SteadyClients(url, model)
        unavailable = asyncio.run(play(agents, batch, faulty, aborted, clients, 60 * minutes, most))
        print("faults have ended; waiting until the fleet is whole", flush=True)
        layers = layer_changes(home)
        left = settled(home, TTL_S + SETTLE_S)
        aborted.look()
        lost, wrong = batch.results()
        if options.logs:
            for log in home.root.rglob("log"):
                copy = options.logs / log.relative_to(home.root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, copy)
        if (more := len(marked(home)) - before) > 0:
            left.append(f"{more} more processes than before")
    seen = agents.seen
    late = over_budget(unavailable, options.allowed_s)
    figures = {
        "lost": len(seen.lost) + len(lost),
        "wrong": len(seen.wrong) + len(wrong),
        "hung": len(seen.hung),
        "leaked": len(left),
        "faults": sum(faulty.counts.values()),
        "conversations": seen.conversations,
        "turns": seen.turns,
        "longest_turn_s": seen.longest_turn_s,
        "over_budget": len(late),
    }
    print("faults:", dict(faulty.counts.most_common()))
    print("tries:", dict(seen.tries.most_common()))
    print(f"aborted iterations: {aborted.total:.0f}")
    for victim, by_kind in unavailable.items():
        print(f"unavailable_s after kill {victim}: {by_kind}")
    print("layers:", {change: count for change, count in layers.items() if count})
    for line in (*seen.lost, *lost, *seen.wrong, *wrong, *seen.hung, *left, *late):
        print(f"  {line[:400]}")
    counts: dict[str, Any] = {
        "unavailable_s": unavailable,
        "tries": seen.tries,
        "by_fault": faulty.counts,
        "layers": layers,
        "aborts": aborted.total,
    }
    report(options.json, figures, **counts)
    bad = any(figures[name] for name in ("lost", "wrong", "hung", "leaked", "over_budget"))
    sys.exit(1 if bad or not figures["faults"] else 0)


if __name__ == "__main__":
    main()
