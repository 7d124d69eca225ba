"""Measures what a token costs in the gateway, compared with HAProxy, FastAPI and peers' routers.

    python -m benchmarks.relay [--quick] [--json FILE] [--peers DIR]

Between a fake engine and a client that checks every answer there is one subject at a time: our
relay alone, our whole gateway (identity, binding by a directory, relay, metrics), HAProxy, our relay and
HAProxy with TLS (each stream is a connection, handshakes included), FastAPI with httpx, and the routers found
under --peers (or $CONSERVE_PEERS; see requirements/peers.txt). The subject `direct` is no proxy at all. Every
subject gets each load in every repetition. A figure is the median over repetitions; a ratio is the median of
the repetitions' ratios. Subjects run on one processor; engine, directory and client on the others. `gateway_`
figures are the gateway's, figures without a prefix the relay's.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.output import command, named_rows, print_rows, report
from benchmarks.harness.processes import Subject
from benchmarks.harness.rounds import rotated
from benchmarks.relay import subjects
from benchmarks.relay.client import Load
from benchmarks.relay.report import (
    FEW,
    FIRST,
    GATEWAY,
    MANY,
    OURS,
    SLOW,
    STEP,
    WHOLE,
    Results,
    medians,
    named_figures,
)

SLOW_REPETITIONS = 3  # few suffice for the slow proxy, whose difference is larger than the machine's noise
SLOW_SHARE = 1 / 8  # share of each load that the slow proxy gets, because it collapses under the whole load
OPEN_FILES = 16_384


@dataclass(frozen=True)
class Scenario:
    """A load, how often it is repeated, and the subjects that take it."""

    name: str
    load: Load
    repetitions: int
    slow_too: bool = False
    only: tuple[str, ...] = ()

    def takes(self, subject: Subject, repetition: int) -> bool:
        if subject.name == SLOW:
            return self.slow_too and repetition < SLOW_REPETITIONS
        return not self.only or subject.name in self.only


def scenarios(quick: bool) -> list[Scenario]:
    def streams(connections: int, rate: int, seconds: float, *, in_step: bool = False) -> Load:
        return Load(0, connections, int(rate * seconds), rate, in_step)

    first_turns, gateway = Load(0, 64, seconds=1.0 if quick else 1.5, fresh=True), (GATEWAY,)
    if quick:
        few = ("direct", OURS, "haproxy")
        return [
            Scenario(STEP, streams(256, 40, 0.8, in_step=True), 3, slow_too=True),
            Scenario(MANY, streams(1000, 40, 1.5), 1),
            Scenario(FEW, streams(100, 20, 1.0), 1, only=few),
            Scenario(WHOLE, Load(0, 64, seconds=1.0), 1),
            Scenario(FIRST, first_turns, 1, only=gateway),
        ]
    return [
        Scenario(STEP, streams(256, 40, 5.0, in_step=True), 7, slow_too=True),
        Scenario(MANY, streams(1000, 40, 4.0), 5),
        Scenario(FEW, streams(100, 20, 1.5), 5, slow_too=True),
        Scenario(WHOLE, Load(0, 64, seconds=1.0), 5, slow_too=True),
        Scenario(FIRST, first_turns, 3, only=gateway),
    ]


def measure(subject: Subject, load: Load, client_processors: set[int]) -> dict[str, Any]:
    """Play a load on a subject from a client process; return the figures of the client and the subject."""
    share = SLOW_SHARE if subject.name == SLOW else 1.0
    connections = max(4, int(load.connections * share))
    given = replace(load, port=subject.port, tls=subject.tls, connections=connections)
    before = subject.cpu_seconds()
    client = subprocess.run(
        [sys.executable, "-m", "benchmarks.relay.client", json.dumps(asdict(given))],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, client_processors),
    )
    cpu_s = subject.cpu_seconds() - before
    result: dict[str, Any] = json.loads(client.stdout)
    return result | {
        "connections": connections,
        "memory_mb": subject.memory_mb(),
        "cpu_s": cpu_s,
        "cpu_ms_per_1k_tokens": cpu_s * 1e6 / result["tokens"] if result["tokens"] else None,
        "requests_per_s": result["requests"] / result["seconds"],
        "requests_per_core_s": result["requests"] / cpu_s if cpu_s else None,
    }


def run(quick: bool, peers: Path | None) -> Results:
    """Measure all scenarios; return results by scenario and subject, one entry per repetition."""
    processors = sorted(os.sched_getaffinity(0))
    under_test, others = {processors[-1]}, set(processors[:-1]) or {processors[-1]}
    results: Results = defaultdict(lambda: defaultdict(list))
    everyone: list[Subject] = []
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        work = Path(folder)
        try:
            engine = subjects.engine()
            directory = subjects.directory(engine.port, work)
            everyone += [engine, directory]
            if not started([engine], work, others):
                raise SystemExit("the fake engine did not start")
            directory.start(work / "directory.log", others)
            contenders = subjects.contenders(engine, directory, work, peers)
            everyone += contenders
            ready = [engine, *started(contenders, work, under_test)]
            for scenario in scenarios(quick):
                for repetition in range(scenario.repetitions):
                    for subject in rotated(ready, repetition):
                        if scenario.takes(subject, repetition):
                            outcome = measure(subject, scenario.load, others)
                            results[scenario.name][subject.name].append(outcome)
        finally:
            for subject in reversed(everyone):
                subject.stop()
    return results


def started(wanted: list[Subject], work: Path, processors: set[int]) -> list[Subject]:
    """Start the `wanted` subjects, and return those that became ready."""
    for subject in wanted:
        subject.start(work / f"{subject.name}.log", processors)
    ready = []
    for subject in wanted:
        if subject.wait_until_ready():
            ready.append(subject)
            continue
        tail = (work / f"{subject.name}.log").read_text(errors="replace")[-500:]
        print(f"{subject.name} did not start and is left out:\n{tail}", file=sys.stderr)
        subject.stop()
    return ready


def allow_many_sockets() -> None:
    """Raise the open-file limit, because HAProxy refuses more connections than it has descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    parser = command(__doc__, quick="ends within 45 s; noisier")
    parser.add_argument("--peers", type=Path, default=os.environ.get("CONSERVE_PEERS"))
    options = parser.parse_args()
    allow_many_sockets()
    results = run(options.quick, Path(options.peers) if options.peers else None)
    table = medians(results)
    figures = named_figures(results, table)
    for scenario, rows in table.items():
        print_rows(scenario, named_rows("subject", rows))
    report(options.json, figures, table=table, runs=results)


if __name__ == "__main__":
    main()
