"""What watching costs: CPU of the gateway per streamed token with metrics and tracing off and on, in one run.

    python -m benchmarks.observe [--quick] [--json FILE]

Gateways that differ only in what watches them take the same streams in turn, each repetition in another
order: without metrics and tracing; with metrics, scraped; with metrics and a share of the turns traced to an
OTLP receiver; with every turn traced. Figures are medians over repetitions of the ratio to the first. A
single ratio strays by a tenth and more, and nothing is traced a token: so the price of a traced turn is also
taken where turns are all there is, from answers that are not streams, and the ratio that follows from it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.relay import __main__ as relay
from benchmarks.relay import subjects
from benchmarks.relay.client import Load
from benchmarks.relay.subjects import Subject
from router.config import TracingConfig
from workers.processes import free_port

OFF = "off"
SCRAPE_S = 5.0  # deploy/prometheus/prometheus.yml
TRACED = TracingConfig("http://127.0.0.1:1").sample  # what a fleet file gets that does not say


@dataclass(frozen=True)
class Watching:
    name: str
    metrics: bool
    sample: float | None  # share of the turns that are traced

    def gateway(self, directory: int, receiver: int, work: Path) -> Subject:
        port, name = free_port(subjects.HOST), self.name.replace(" ", "-")
        config = {
            "directory": f"127.0.0.1:{directory}",
            "directory_secret": subjects.SECRET,
            "models": [{"name": "m"}],
            "name": name,
            "port": port,
            "policy": "collocated",
        }
        if self.sample is not None:
            config["tracing"] = {"endpoint": f"http://127.0.0.1:{receiver}", "sample": self.sample}
        file = work / f"{name}.json"
        file.write_text(json.dumps(config))
        module = ["router.gateway"] if self.metrics else ["benchmarks.observe_processes", "gateway"]
        command = [sys.executable, "-m", *module, "--config", str(file)]
        return Subject(self.name, command, port, ready_path="/ready")


WATCHINGS = (
    Watching(OFF, False, None),
    Watching("metrics", True, None),
    Watching(f"metrics, {TRACED:.0%} traced", True, TRACED),
    Watching("metrics, all traced", True, 1.0),
)
NAMES = {WATCHINGS[1].name: "metrics", WATCHINGS[2].name: "metrics_tracing", WATCHINGS[3].name: "all_traced"}


class Scraper:
    """As Prometheus would, while a load runs."""

    def __init__(self, port: int, every_s: float) -> None:
        self._url, self._every_s = f"http://127.0.0.1:{port}/metrics", every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s / 2):
            with urllib.request.urlopen(self._url, timeout=10) as answer:
                answer.read()
            self._ended.wait(self._every_s / 2)


@dataclass(frozen=True)
class ObserverCost:
    """CPU in µs by what watches, one a repetition."""

    tokens: dict[str, list[float]]  # of a streamed token
    turns: dict[str, list[float]]  # of a turn whose answer is no stream


def run(load: Load, turns: Load, repetitions: int) -> ObserverCost:
    processors = sorted(os.sched_getaffinity(0))
    under_test, others = {processors[-1]}, set(processors[:-1]) or {processors[-1]}
    names = [watching.name for watching in WATCHINGS]
    found = ObserverCost({name: [] for name in names}, {name: [] for name in names})
    with tempfile.TemporaryDirectory(prefix="observe-bench-") as folder:
        work = Path(folder)
        port = free_port(subjects.HOST)
        command = [sys.executable, "-m", "benchmarks.observe_processes", "receiver", str(port)]
        receiver, engine = Subject("receiver", command, port), subjects.engine()
        directory = subjects.directory(engine.port, work)
        started: list[Subject] = []
        try:
            for helper in (engine, receiver, directory):
                helper.start(work / f"{helper.name}.log", others)
                started.append(helper)
                if helper is not directory and not helper.wait_until_ready():
                    raise SystemExit(f"the {helper.name} did not start")
            gateways = [one.gateway(directory.port, receiver.port, work) for one in WATCHINGS]
            for gateway in gateways:
                gateway.start(work / f"{gateway.name}.log", under_test)
                started.append(gateway)
            for gateway in gateways:
                if not gateway.wait_until_ready():
                    raise SystemExit((work / f"{gateway.name}.log").read_text()[-2000:])
                for unmeasured in (load, turns):  # what is loaded and grown at first is not counted
                    measure(gateway, unmeasured, others)
            for repetition in range(repetitions):
                turned = repetition % len(gateways)
                for gateway in (*gateways[turned:], *gateways[:turned]):
                    # One that has done nothing for half a minute costs a fifth more for a second.
                    measure(gateway, replace(load, tokens=load.tokens // 4), others)
                    found.tokens[gateway.name].append(measure(gateway, load, others))
                    found.turns[gateway.name].append(measure(gateway, turns, others))
        finally:
            for subject in reversed(started):
                subject.stop()
    return found


def measure(gateway: Subject, load: Load, others: set[int]) -> float:
    began = gateway.cpu_seconds()
    if gateway.name == OFF:
        result = relay.measure(gateway, load, others)
    else:
        with Scraper(gateway.port, SCRAPE_S):
            result = relay.measure(gateway, load, others)
    if "traced" in gateway.name:
        time.sleep(1.5)  # spans are sent behind the streams; they count as well
    if result["errors"]:
        raise SystemExit(f"{gateway.name}: {result['errors']} errors")
    return (gateway.cpu_seconds() - began) * 1e6 / float(result["tokens"] or result["requests"])


def figures(found: ObserverCost, tokens: int) -> dict[str, float]:
    off = found.tokens[OFF]
    shown = {"off_cpu_us_per_token": statistics.median(off)}
    for name, short in NAMES.items():
        ratios = [on / base for on, base in zip(found.tokens[name], off, strict=True)]
        shown[f"{short}_cpu_ratio"] = statistics.median(ratios)
    of_turn = {name: statistics.median(found.turns[watching]) for watching, name in NAMES.items()}
    shown["traced_turn_us"] = of_turn["all_traced"] - of_turn["metrics"]
    of_stream = tokens * shown["off_cpu_us_per_token"]
    shown["all_traced_cpu_ratio_by_price"] = 1 + shown["traced_turn_us"] / of_stream
    return {name: round(value, 4) for name, value in shown.items()}


def main() -> None:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=summary)
    parser.add_argument("--quick", action="store_true", help="ends within 45 s; noisier")
    parser.add_argument("--json", type=Path, help="write named figures and every measurement there")
    arguments = parser.parse_args()
    # In step: an engine's tokens leave with its iterations.
    load = Load(0, 128, 150, 75, in_step=True) if arguments.quick else Load(0, 256, 250, 50, in_step=True)
    turns = Load(0, 64, seconds=1.0 if arguments.quick else 2.0)
    found = run(load, turns, 2 if arguments.quick else 8)
    named = figures(found, load.tokens)
    print(f"{'watched by':24} {'CPU a token':>12}  {'to off':>7}  {'spread':11}  {'CPU a turn':>12}")
    for name, values in found.tokens.items():
        ratios = [value / base for value, base in zip(values, found.tokens[OFF], strict=True)]
        middle, spread = statistics.median(ratios), f"{min(ratios):.3f}–{max(ratios):.3f}"
        of_turn = statistics.median(found.turns[name])
        print(f"{name:24} {statistics.median(values):9.2f} µs  {middle:7.3f}  {spread}  {of_turn:9.1f} µs")
    print(f"streams of {load.tokens} tokens, {load.connections} at once; turns: answers that are no streams")
    price, by_price = named["traced_turn_us"], named["all_traced_cpu_ratio_by_price"]
    print(f"tracing costs {price:.0f} µs a turn: of such streams {by_price:.3f} if all are; target 1.03")
    if arguments.json:
        arguments.json.write_text(json.dumps({**named, "runs": asdict(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
