"""Fixed and elastic roles of prefillers in simulation, on recorded agents, at shares of the fleet's capacity.

    python -m benchmarks.paper.roles [--engines 8,64,1000] [--loads 0.8,1.0,1.5,2.0] [--quick] [--json FILE]

One engine in four is a prefiller. The conversations are those of the laptop sample, half as long, repeated
until there are 37 for each engine. Their waits are at most 2 s, so that most of a play is a steady state. The
capacity is the rate at which busy collocated engines serve conversations that all arrive at once.
`idle_while_waiting` is the idle share of the least busy role while turns queue for more than a second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.output import command, print_rows, report
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings, PrefillerRoles
from traces import generators
from traces.format import TraceConversation, load
from traces.simulator.metrics import SimulationSummary, summarise
from traces.simulator.policies import System, SystemSettings
from traces.simulator.profiles import find
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier

SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "laptop.jsonl.gz"
SHRINK, EACH = 2, 37  # divisor of lengths; conversations for each engine
SLOWER = 4.0  # how much slower an engine is than in the laptop profile, where it has a core of its own
PREFILLERS = 0.25  # share of the engines
MOST_AT_ONCE = 64  # most engines in the play that measures capacity: its queues are long
ENGINES, LOADS = "8,64,1000", "0.8,1.0,1.5,2.0"


@dataclass(frozen=True)
class RolesRow:
    """Figures of one fleet at one load."""

    engines: int
    load: float
    roles: str
    idle_while_waiting: float
    ttfet_p50_s: float
    ttfet_p95_s: float
    later_ttft_p95_s: float
    e2e_p95_s: float
    gap_p99_s: float
    prefiller_share: float
    served_s: float


def profile() -> EngineProfile:
    """Return the profile of an engine that shares a processor core with others."""
    base = find("laptop")
    model = base.latency
    slower = replace(
        model,
        per_token=model.per_token * SLOWER,
        per_attended=model.per_attended * SLOWER,
        per_context=model.per_context * SLOWER,
        constant=model.constant * SLOWER,
    )
    return replace(base, latency=slower, chunk_tokens=4096, kv_tokens=98_304)


def conversations(count: int) -> list[TraceConversation]:
    alone = (replace(one, parent=None) for one in load(SAMPLE).conversations)
    found = list(generators.scale(alone, generators.Scale(lengths=1 / SHRINK)))
    return [replace(found[n % len(found)], id=f"{n} {found[n % len(found)].id}") for n in range(count)]


def capacity(found: Sequence[TraceConversation], engines: int, profile: EngineProfile) -> float:
    """Return how many conversations a second collocated engines serve while they are busy.

    The number is in proportion to the engines, so that only a part of a large fleet is played.
    """
    played = min(engines, MOST_AT_ONCE)
    at_once = [
        replace(one, arrival_s=0.0, turns=tuple(replace(turn, wait_s=0.0) for turn in one.turns))
        for one in found[: EACH * played]
    ]
    fleet = SimulatedFleet((SimulatedTier("mixed", Role.MIXED, played, profile),))
    placer = PlacerSettings(max_prefill_wait_s=float("inf"))
    simulation = Simulation(fleet, SimulationSettings(SystemSettings(System.COLLOCATED), placer))
    simulation.run(at_once)
    busy_s = sum(engine.prefill_s + engine.decode_s for engine in simulation.fleet.engines.values())
    return len(at_once) * engines / busy_s


def play(
    trace: Sequence[TraceConversation], engines: int, profile: EngineProfile, roles: PrefillerRoles
) -> SimulationSummary:
    prefillers = max(1, round(engines * PREFILLERS))
    fleet = SimulatedFleet(
        (
            SimulatedTier("prefill", Role.PREFILL, prefillers, profile),
            SimulatedTier("decode", Role.DECODE, engines - prefillers, profile),
        )
    )
    placer = PlacerSettings(max_prefill_wait_s=float("inf"), roles=roles)
    system = SystemSettings(System.ELASTIC)
    settings = SimulationSettings(system, placer, prefillers_cache=True, reserved_until_held=True)
    return summarise(roles, Simulation(fleet, settings).run(trace))


def table(sizes: Sequence[int], loads: Sequence[float]) -> Iterator[RolesRow]:
    engine = profile()
    for engines in sizes:
        found = conversations(EACH * engines)
        served = capacity(found, engines, engine)
        for share in loads:
            times = generators.poisson(share * served, generators.stream(0, "arrivals"))
            trace = list(generators.arriving(found, times))
            for roles in PrefillerRoles:
                seen = play(trace, engines, engine, roles)
                row = RolesRow(
                    *(engines, share, roles.value, round(seen.idle_while_waiting, 3)),
                    *(seen.ttfet_p50_s, seen.ttfet_p95_s, seen.later_turn_ttft_p95_s, seen.e2e_p95_s),
                    *(seen.token_gap_p99_s, seen.prefiller_share, seen.horizon_s),
                )
                print(row, flush=True)
                yield row


def figures(rows: Sequence[RolesRow]) -> dict[str, float]:
    """Return `idle_while_waiting` for its worst load, by number of engines and kind of roles."""
    worst: dict[str, float] = {}
    for one in rows:
        name = f"idle_while_waiting_{one.roles}_{one.engines}"
        worst[name] = max(worst.get(name, 0.0), one.idle_while_waiting)
    return worst


def main() -> None:
    parser = command(__doc__, quick="8 engines, at 1.0 and 1.5")
    parser.add_argument("--engines", default=ENGINES, help=f"fleet sizes (default: {ENGINES})")
    parser.add_argument("--loads", default=LOADS, help=f"shares of the capacity (default: {LOADS})")
    options = parser.parse_args()
    sizes, loads = ("8", "1.0,1.5") if options.quick else (options.engines, options.loads)
    rows = list(table([int(one) for one in sizes.split(",")], [float(one) for one in loads.split(",")]))
    print_rows("Roles of prefillers", rows)
    report(options.json, figures(rows), table=rows)


if __name__ == "__main__":
    main()
