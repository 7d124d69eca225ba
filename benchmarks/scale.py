"""What simulating costs as the fleet grows: events a second, and the cost of one event at each size.

python -m benchmarks.scale [--quick] [--json FILE]

Load grows with the fleet (a prefiller for every three decoders, 90 % of what the prefillers carry), so every
size sees the same traffic per engine. Costs are CPU time (the simulator is one thread); the wall clock is
shown beside it. `--quick` plays a twentieth of the conversations.
"""

import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import log
from time import perf_counter, process_time

from benchmarks.output import command, write_json
from benchmarks.paper import a40
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings
from traces import generators
from traces.format import TraceConversation
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet, SimulatedTier

SIZES = (10, 100, 1_000, 10_000)
CONVERSATIONS_AT_LEAST = 20_000
LOAD = 0.9
PARK_AFTER_S = 30.0  # what the published figures were made with


@dataclass(frozen=True)
class ScaleRow:
    decoders: int
    conversations: int
    events: int
    seconds: float
    cpu_s: float
    us_per_event: float
    events_per_s: float
    peak_gib: float


def fleet(decoders: int) -> SimulatedFleet:
    engine = a40.A40().engine(a40.PREFILL_CHUNK)
    prefillers = max(1, round(decoders / 3))
    return SimulatedFleet(
        (
            SimulatedTier("prefill", Role.PREFILL, prefillers, engine),
            SimulatedTier("decode", Role.DECODE, decoders, engine),
        )
    )


def trace(decoders: int, count: int) -> Iterator[TraceConversation]:
    rate = max(1, round(decoders / 3)) * a40.SATURATED_RATE * LOAD
    times = generators.poisson(rate, generators.stream(0, "arrivals"))
    return generators.arriving(generators.swe_bench_conversations(count, 0), times)


def measure(decoders: int, conversations: int) -> ScaleRow:
    settings = SimulationSettings(
        SystemSettings(System.PREFILLER),
        PlacerSettings(max_prefill_wait_s=float("inf")),
        park_after_s=PARK_AFTER_S,
    )
    began, cpu = perf_counter(), process_time()
    totals = Simulation(fleet(decoders), settings).run(trace(decoders, conversations)).totals
    seconds, cpu_s = perf_counter() - began, process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return ScaleRow(
        decoders,
        totals.conversations,
        totals.events,
        round(seconds, 1),
        round(cpu_s, 1),
        round(cpu_s / totals.events * 1e6, 2),
        round(totals.events / cpu_s),
        round(peak, 2),
    )


def main() -> None:
    parser = command(__doc__, quick="a twentieth of the conversations")
    options = parser.parse_args()
    measure(SIZES[0], 100)  # imports and first calls are not an event's cost
    rows = []
    for decoders in SIZES:
        conversations = max(CONVERSATIONS_AT_LEAST, decoders * 100) // (20 if options.quick else 1)
        rows.append(measure(decoders, conversations))
        print("  ".join(f"{name} {value}" for name, value in asdict(rows[-1]).items()), flush=True)
    ratio = rows[-1].us_per_event / rows[0].us_per_event
    allowed = log(SIZES[-1]) / log(SIZES[0])
    print(f"cost of an event at {SIZES[-1]} decoders / at {SIZES[0]}: {ratio:.2f} (log n: {allowed:.2f})")
    figures = {"events_per_s_10k": rows[-1].events_per_s, "cost_ratio_10k_vs_10": round(ratio, 3)}
    write_json(options.json, figures | {"table": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
