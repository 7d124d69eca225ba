"""What simulating costs as the fleet grows: events a second, and the cost of one event at each size.

python -m benchmarks.scale [--quick] [--json FILE]

Load grows with the fleet (a prefiller for every three decoders, 90 % of what the prefillers carry), so every
size sees the same traffic per engine. Costs are CPU time (the simulator is one thread); the wall clock is
shown beside it. `--quick` plays a twentieth of the conversations.
"""

import argparse
import json
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from time import perf_counter, process_time

from placement.engines import Role
from placement.placer import PlacerSettings
from traces.format import Conversation
from traces.generators import arrivals, draws, swe_bench
from traces.simulator import a40
from traces.simulator.policies import System, SystemSettings
from traces.simulator.profile import Fleet, Tier
from traces.simulator.simulation import Simulation, SimulationSettings

SIZES = (10, 100, 1_000, 10_000)
CONVERSATIONS_AT_LEAST = 20_000
LOAD = 0.9


@dataclass(frozen=True)
class Row:
    decoders: int
    conversations: int
    events: int
    seconds: float
    cpu_s: float
    us_per_event: float
    events_per_s: float
    peak_gib: float


def fleet(decoders: int) -> Fleet:
    engine = a40.Calibration().engine(a40.PREFILL_CHUNK)
    prefillers = max(1, round(decoders / 3))
    return Fleet(
        (Tier("prefill", Role.PREFILL, prefillers, engine), Tier("decode", Role.DECODE, decoders, engine))
    )


def trace(decoders: int, count: int) -> Iterator[Conversation]:
    rate = max(1, round(decoders / 3)) * a40.SATURATED_RATE * LOAD
    times = arrivals.poisson(rate, draws.stream(0, "arrivals"))
    return arrivals.arriving(swe_bench.conversations(count, 0), times)


def measure(decoders: int, conversations: int) -> Row:
    settings = SimulationSettings(
        SystemSettings(System.CONSERVE), PlacerSettings(max_prefill_wait_s=float("inf"))
    )
    began, cpu = perf_counter(), process_time()
    totals = Simulation(fleet(decoders), settings).run(trace(decoders, conversations)).totals
    seconds, cpu_s = perf_counter() - began, process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Row(
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
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
    if options.json:
        options.json.write_text(
            json.dumps(figures | {"table": [asdict(row) for row in rows]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
