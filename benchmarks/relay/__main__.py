"""What a token costs on its way through the gateway, beside what it costs through others.

    python -m benchmarks.relay [--quick] [--json FILE] [--plot FILE] [--page FILE] [--peers DIR]

One fake engine, one client that checks what it gets, and in turn between them: nothing, our relay alone, our
whole gateway (identity, binding by a directory, relay, metrics), our relay and HAProxy with and without TLS
(handshakes included: each stream is a connection), FastAPI with httpx, and the peers'
routers found under ``--peers`` (or ``$CONSERVE_PEERS``; see requirements/peers.txt). Every subject gets each
load in every repetition (Ray Serve, whose processes work while they idle, after the others); figures are
medians, ratios medians of the repetitions' own. Subjects run on one processor; engine, directory and client
on the others. The named figures are the relay's, those with
``gateway_`` the gateway's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.relay import page, report, subjects
from benchmarks.relay.client import Load
from benchmarks.relay.subjects import Subject

Runs = dict[str, dict[str, list[dict[str, Any]]]]

SLOW_ONES_TURNS = 3
"""Repetitions for subjects that cannot take the whole load. The others differ by less than the machine's
noise: they need more."""


@dataclass(frozen=True)
class Scenario:
    name: str
    load: Load
    repetitions: int
    slow_ones: bool = False
    """Also for subjects that cannot take the whole load."""
    only: tuple[str, ...] = ()
    """The subjects it is for; empty: all."""

    def takes(self, subject: Subject) -> bool:
        if self.only and subject.name not in self.only:
            return False
        return subject.share == 1.0 or self.slow_ones


def scenarios(quick: bool) -> list[Scenario]:
    def streams(connections: int, rate: int, seconds: float, *, in_step: bool) -> Load:
        return Load(0, connections, int(rate * seconds), rate, in_step)

    if quick:
        return [
            Scenario(report.STEP, streams(256, 40, 0.8, in_step=True), 3, slow_ones=True),
            Scenario(report.MANY, streams(1000, 40, 1.5, in_step=False), 1),
            Scenario(
                report.FEW, streams(100, 20, 1.0, in_step=False), 1, only=("direct", report.OURS, "haproxy")
            ),
            Scenario(report.WHOLE, Load(0, 64, seconds=1.0), 1),
            Scenario(report.FIRST, Load(0, 64, seconds=1.0, fresh=True), 1, only=(report.GATEWAY,)),
        ]
    return [
        Scenario(report.STEP, streams(256, 40, 5.0, in_step=True), 7, slow_ones=True),
        Scenario(report.MANY, streams(1000, 40, 4.0, in_step=False), 5),
        Scenario(report.FEW, streams(100, 20, 1.5, in_step=False), 5, slow_ones=True),
        Scenario(report.WHOLE, Load(0, 64, seconds=1.0), 5, slow_ones=True),
        Scenario(report.FIRST, Load(0, 64, seconds=1.5, fresh=True), 3, only=(report.GATEWAY,)),
    ]


def measure(subject: Subject, load: Load, client_processors: set[int]) -> dict[str, Any]:
    share = subject.share
    given = Load(
        **{
            **asdict(load),
            "port": subject.port,
            "tls": subject.tls,
            "connections": max(4, int(load.connections * share)),
        }
    )
    before = subject.cpu_seconds()
    client = subprocess.run(
        [sys.executable, "-m", "benchmarks.relay.client", json.dumps(asdict(given))],
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, client_processors),
    )
    cpu = subject.cpu_seconds() - before
    result: dict[str, Any] = json.loads(client.stdout)
    result["connections"] = given.connections
    result["memory_mb"] = subject.memory_mb()
    result["cpu_s"] = cpu
    result["cpu_ms_per_1k_tokens"] = cpu * 1e6 / result["tokens"] if result["tokens"] else None
    result["requests_per_s"] = result["requests"] / result["seconds"]
    result["requests_per_core_s"] = result["requests"] / cpu if cpu else None
    return result


def run(quick: bool, peers: Path | None) -> Runs:
    """Results by scenario and subject, one entry a repetition."""
    processors = sorted(os.sched_getaffinity(0))
    under_test, others = {processors[-1]}, set(processors[:-1]) or {processors[-1]}
    results: Runs = defaultdict(lambda: defaultdict(list))
    all_of_them: list[Subject] = []
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        work = Path(folder)
        try:
            engine = subjects.engine()
            directory = subjects.directory(engine.port, work)
            all_of_them += [engine, directory]
            if engine not in _start([engine], work, others):
                raise SystemExit("the fake engine did not start")
            directory.start(work / "directory.log", others)
            url = f"http://127.0.0.1:{engine.port}"
            contenders = [subjects.ours(url), subjects.our_gateway(directory.port, work)]
            cert, key = subjects.certificate(work)
            contenders.append(subjects.ours_sealed(url, cert, key))
            proxies = [subjects.haproxy(engine.port, work), subjects.haproxy(engine.port, work, cert)]
            contenders += filter(None, proxies)
            contenders.append(subjects.httpx_proxy(url))
            if peers is not None:
                contenders += subjects.peers(peers, engine.port, work, slow_ones=not quick)
            all_of_them += contenders
            quiet = [subject for subject in contenders if not subject.restless]
            _take_turns([engine, *_start(quiet, work, under_test)], quick, others, results)
            for subject in quiet:
                subject.stop()
            for subject in contenders:
                if subject.restless:
                    _take_turns(_start([subject], work, under_test), quick, others, results)
                    subject.stop()
        finally:
            for subject in reversed(all_of_them):
                subject.stop()
    return results


def _start(wanted: list[Subject], work: Path, processors: set[int]) -> list[Subject]:
    """Those that came up."""
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


def _take_turns(started: list[Subject], quick: bool, client_processors: set[int], results: Runs) -> None:
    for scenario in scenarios(quick):
        for repetition in range(scenario.repetitions):
            # Each begins once, so that none is always measured just after the same other.
            first = repetition % max(len(started), 1)
            for subject in started[first:] + started[:first]:
                if scenario.takes(subject) and (subject.share == 1.0 or repetition < SLOW_ONES_TURNS):
                    outcome = measure(subject, scenario.load, client_processors)
                    results[scenario.name][subject.name].append(outcome)


def main() -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=summary)
    parser.add_argument("--quick", action="store_true", help="ends within 45 s; noisier")
    parser.add_argument("--json", type=Path, help="write named figures and the full table there")
    parser.add_argument("--plot", type=Path, help="write a plot there")
    parser.add_argument(
        "--page", type=Path, help="write a page with tables there, its plot in figures/ beside it"
    )
    parser.add_argument("--peers", type=Path, default=os.environ.get("CONSERVE_PEERS"))
    arguments = parser.parse_args()
    _allow_many_sockets()
    results = run(arguments.quick, Path(arguments.peers) if arguments.peers else None)
    table = report.medians(results)
    figures = report.named_figures(results, table)
    print(report.render(table, figures))
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, "table": table, "runs": results}, indent=1) + "\n")
    plot = arguments.plot or (arguments.json.with_suffix(".png") if arguments.json else None)
    if plot is not None:
        report.plot(table, plot)
    if arguments.page:
        figure = arguments.page.parent / "figures" / f"{arguments.page.stem}.svg"
        figure.parent.mkdir(parents=True, exist_ok=True)
        report.plot(table, figure)
        plotted = figure.relative_to(arguments.page.parent)
        arguments.page.write_text(page.written(table, figures, str(plotted), quick=arguments.quick))


def _allow_many_sockets() -> None:
    """HAProxy refuses more connections than it has descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16384 if hard == resource.RLIM_INFINITY else min(16384, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    main()
