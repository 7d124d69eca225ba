"""How the cost of a simulated event grows with the fleet.

    python -m benchmarks.scale [--quick] [--json FILE]

A fleet has a prefiller for every three decoders. The load is 90 % of what the prefillers can compute, so that
every size sees the same traffic per engine. The simulator is one thread, and its costs are CPU time.
"""

import resource
from dataclasses import asdict, dataclass
from math import log
from time import perf_counter, process_time

from benchmarks.harness.output import command, write_json
from benchmarks.paper import a40
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings
from traces import generators
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet, SimulatedTier

SIZES = (10, 100, 1_000, 10_000)
LEAST_CONVERSATIONS = 20_000
LOAD = 0.9
PARK_AFTER_S = 30.0


@dataclass(frozen=True)
class ScaleRow:
    """Cost of simulating one fleet: events, time and memory."""

    decoders: int
    conversations: int
    events: int
    seconds: float
    cpu_s: float
    us_per_event: float
    events_per_s: float
    peak_gib: float


def measure(decoders: int, conversations: int) -> ScaleRow:
    prefillers = max(1, round(decoders / 3))
    fleet = SimulatedFleet(
        (
            SimulatedTier("prefill", Role.PREFILL, prefillers, a40.ENGINE),
            SimulatedTier("decode", Role.DECODE, decoders, a40.ENGINE),
        )
    )
    rate = prefillers * a40.SATURATED_RATE * LOAD
    times = generators.poisson(rate, generators.stream(0, "arrivals"))
    trace = generators.arriving(generators.swe_bench_conversations(conversations, 0), times)
    settings = SimulationSettings(
        SystemSettings(System.PREFILLER),
        PlacerSettings(max_prefill_wait_s=float("inf")),
        park_after_s=PARK_AFTER_S,
    )
    began, cpu = perf_counter(), process_time()
    totals = Simulation(fleet, settings).run(trace).totals
    seconds, cpu_s = perf_counter() - began, process_time() - cpu
    return ScaleRow(
        decoders,
        totals.conversations,
        totals.events,
        seconds=round(seconds, 1),
        cpu_s=round(cpu_s, 1),
        us_per_event=round(cpu_s / totals.events * 1e6, 2),
        events_per_s=round(totals.events / cpu_s),
        peak_gib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    )


def main() -> None:
    options = command(__doc__, quick="a twentieth of the conversations").parse_args()
    measure(SIZES[0], 100)  # imports and first calls are not an event's cost
    rows = []
    for decoders in SIZES:
        count = max(LEAST_CONVERSATIONS, decoders * 100) // (20 if options.quick else 1)
        rows.append(measure(decoders, count))
        print("  ".join(f"{name} {value}" for name, value in asdict(rows[-1]).items()), flush=True)
    ratio = rows[-1].us_per_event / rows[0].us_per_event
    allowed = log(SIZES[-1]) / log(SIZES[0])
    print(f"cost of an event at {SIZES[-1]} decoders / at {SIZES[0]}: {ratio:.2f} (log n: {allowed:.2f})")
    figures = {"events_per_s_10k": rows[-1].events_per_s, "cost_ratio_10k_vs_10": round(ratio, 3)}
    write_json(options.json, figures | {"table": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
