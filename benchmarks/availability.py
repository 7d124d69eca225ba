"""How many seconds clients go without an answer after a process of a fleet is killed, by kind of process.

    python -m benchmarks.availability [--quick] [--json FILE] [--fleet FILE] [PROCESS …]

Small clients begin conversations, take turns of bound ones, and read long streams, two of each kind. They ask
again immediately when a request fails. One process after another gets `kill -9`; the fleet becomes whole
before the next one. A figure is the longest wait of a client for its next token after a kill, minus the
longest wait of the same kind of client without faults in the same run. A client whose stream is cut asks
again, and waits until the first token of the new answer. A figure may exceed its budget by half a second,
because a process that starts again takes processor time from everything else.

The first kill is that of the only gateway; then the fleet gets a second gateway.
"""

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.chaos.faults import victims
from benchmarks.chaos.watching import WHOLE_S, whole
from benchmarks.harness.fleet import RANDOM, brought_up, change, changed
from benchmarks.harness.output import command, print_rows, report
from benchmarks.harness.steady_clients import BOUND, KINDS, NEW, STREAM, SteadyClients
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import fleet_status, serving
from placement.routing.placer_settings import FirstTurns
from workers.processes import tree

QUIET_S, WATCH_S, QUICK_WATCH_S = 8.0, 40.0, 15.0
RESTS_S = 3.0  # pause after the fleet has become whole
ALLOWED_S = 0.5  # how far a wait may exceed its budget


@dataclass(frozen=True)
class KilledProcess:
    """A process to kill, and how many seconds without an answer its end may cost each kind of client."""

    name: str
    command: str  # text that its command line contains
    budget_s: Mapping[str, float]  # a kind that is missing has no budget
    engine: str = ""  # the engine that the process belongs to, if any
    may_cut_streams: bool = False


NOTHING = dict.fromkeys(KINDS, 0.0)
ONLY_GATEWAY = "only_gateway"
PROCESSES = (
    KilledProcess(ONLY_GATEWAY, "router.gateway.main", dict.fromkeys(KINDS, 5.0), may_cut_streams=True),
    KilledProcess("gateway_of_several", "router.gateway.main", NOTHING, may_cut_streams=True),
    KilledProcess("directory", "deploy.directory", {NEW: 5.0, BOUND: 0.0, STREAM: 0.0}),
    KilledProcess("keeper", "ray::KeeperActor", NOTHING),
    KilledProcess("batch", "router.batch", NOTHING),
    KilledProcess("gcs", "gcs_server", NOTHING),
    KilledProcess("raylet", "raylet/raylet", NOTHING),
    KilledProcess("decoder", "VLLM::EngineCore", {}, engine="decode-0"),
    KilledProcess("prefiller", "VLLM::EngineCore", {}, engine="prefill-0"),
)


@dataclass(frozen=True)
class Kill:
    """Times of a kill: the start of the quiet period before it, the kill itself, and the end of watching."""

    quiet_since: float
    killed_at: float
    until: float


@dataclass(frozen=True)
class Unavailability:
    """Waits of one kind of client after the kill of one process, and their budget."""

    process: str
    clients: str
    longest_wait_s: float
    unavailable_s: float
    budget_s: float | None
    streams_cut: int | None = None  # only for clients that read streams
    over_budget: bool = False


def prepared(fleet: FleetSpec) -> FleetSpec:
    """Return a fleet in which new conversations need every process.

    Prefillers compute all first turns.
    """
    return changed(
        fleet,
        name="availability",
        engine={"start_together": 2},
        placement={"first_turns": FirstTurns.PREFILLER},
    )


async def kill_each(
    home: FleetHome, fleet: FleetSpec, clients: SteadyClients, wanted: Iterable[KilledProcess], watch_s: float
) -> dict[str, Kill]:
    """Kill one process after another while clients send requests."""
    kills, gateways = {}, 1
    asking = asyncio.create_task(clients.run())
    try:
        for process in wanted:
            if gateways == 1 and process.name != ONLY_GATEWAY:
                await asyncio.to_thread(change, home, changed(fleet, gateway={"processes": 2}))
                gateways = 2
            await until_whole(home, gateways)
            await asyncio.sleep(RESTS_S)
            if not await clients.all_answered():
                raise SystemExit("some clients get no answer without a fault")
            quiet_since = time.monotonic()
            await asyncio.sleep(QUIET_S)
            victim = await asyncio.to_thread(victim_of, home, process)
            killed_at = time.monotonic()
            victim.kill()
            await asyncio.sleep(watch_s)
            until = time.monotonic()
            if not await clients.all_answered():  # waits still open are measured to their end
                until = time.monotonic()
            kills[process.name] = Kill(quiet_since, killed_at, until)
            failures = clients.failures(killed_at, until)
            waits = clients.longest_waits(killed_at, until).items()
            longest = ", ".join(f"{kind} {end - begin:.1f} s" for kind, (begin, end) in waits)
            print(f"{process.name} (pid {victim.pid}): longest waits {longest}", flush=True)
            for failure, count in failures.most_common(5):
                print(f"  {count} times {failure}", flush=True)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    return kills


async def until_whole(home: FleetHome, gateways: int) -> None:
    """Wait until all engines serve and all gateways are connected to the directory."""
    deadline = time.monotonic() + WHOLE_S

    def is_whole() -> bool:
        return whole(home) and len(fleet_status(home).gateways) == gateways

    while not await asyncio.to_thread(is_whole):
        if time.monotonic() > deadline:
            raise SystemExit(f"the fleet is not whole after {WHOLE_S:.0f} s")
        await asyncio.sleep(0.5)


def victim_of(home: FleetHome, process: KilledProcess) -> psutil.Process:
    """Return the process to kill: of several processes of this kind, the one with the most connections."""
    found = victims(home, process.command)
    if process.engine:
        (engine,) = (one for one in fleet_status(home).engines if one.engine == process.engine)
        own = {one.pid for one in tree(psutil.Process(engine.pid))}
        found = [one for one in found if one.pid in own]
    return max(found, key=lambda one: len(one.net_connections("inet")))


def seen(clients: SteadyClients, kills: Mapping[str, Kill]) -> list[Unavailability]:
    """Return how long each kind of client waited without faults and after each kill."""
    undisturbed = dict.fromkeys(KINDS, 0.0)
    for kill in kills.values():
        for kind, (begin, end) in clients.longest_waits(kill.quiet_since, kill.killed_at).items():
            # A wait that began before the kill and ended after it counts only until the kill.
            undisturbed[kind] = max(undisturbed[kind], min(end, kill.killed_at) - begin)
    rows = [Unavailability("none", kind, wait_s, 0.0, None) for kind, wait_s in undisturbed.items()]
    for process in PROCESSES:
        if process.name not in kills:
            continue
        kill = kills[process.name]
        for kind, (begin, end) in clients.longest_waits(kill.killed_at, kill.until).items():
            lost_s, budget_s = max(0.0, end - begin - undisturbed[kind]), process.budget_s.get(kind)
            cut = clients.failures(kill.killed_at, kill.until, kind).total() if kind == STREAM else None
            over = bool(cut) and not process.may_cut_streams
            over = over or (budget_s is not None and lost_s > budget_s + ALLOWED_S)
            rows.append(Unavailability(process.name, kind, end - begin, lost_s, budget_s, cut, over))
    return rows


def figures_of(rows: Iterable[Unavailability]) -> dict[str, Any]:
    """Return the seconds without an answer by process and kind of client, and which exceed their budget."""
    killed = {f"{row.process}_{row.clients}": row for row in rows if row.process != "none"}
    figures: dict[str, Any] = {name: row.unavailable_s for name, row in killed.items()}
    return {**figures, "over_budget": [name for name, row in killed.items() if row.over_budget]}


def main() -> None:
    parser = command(__doc__, f"watch for {QUICK_WATCH_S:.0f} s, not {WATCH_S:.0f}", RANDOM)
    names = [process.name for process in PROCESSES]
    parser.add_argument("process", nargs="*", choices=[[], *names], help="kill only these, in this order")
    options = parser.parse_args()
    wanted = [one for one in PROCESSES if one.name in (options.process or names)]
    fleet = prepared(load_fleet(options.fleet))
    with brought_up(fleet) as home:
        clients = SteadyClients(serving(home).endpoint, fleet.model.name)
        watch_s = QUICK_WATCH_S if options.quick else WATCH_S
        kills = asyncio.run(kill_each(home, fleet, clients, wanted, watch_s))
    rows = seen(clients, kills)
    print_rows("seconds without an answer", rows)
    figures = figures_of(rows)
    report(options.json, figures, rows=rows)
    sys.exit(1 if figures["over_budget"] else 0)


if __name__ == "__main__":
    main()
