"""One trace under three policies, on a live fleet and in simulation: do both put the systems in one order?

python -m benchmarks.live_policies [--quick] [--json FILE] [--fleet FILE]

The fleet file is brought up anew for each policy (its `policy:` and nothing else differs) with one prefiller
and one decoder: as many engines as this machine has cores, for engines that take each other's time are not
modelled. A few conversations played alone give the latency model of the simulation, and the rate: the
prefiller gets 70 % of what it carries. What is compared: p95 of the time to the first token that speaks to
the user, of the last turn's time between tokens, and of the whole conversation, tools left out: a pair of
systems that the simulation puts 30 % apart or more has to be in the same order live. `--quick` simulates.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import yaml

from benchmarks.output import command, write_json
from benchmarks.paper import workload
from benchmarks.paper.workload import PaperMix
from deploy.cli.commands.simulate import simulated_fleet, simulation_settings
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import serving
from placement.engines import Role
from placement.routing.placer_settings import PlacingPolicy
from traces.format import TraceConversation
from traces.replay import Replay, ReplayOptions, ReplayWatcher
from traces.replay import replay as play
from traces.replay.results import PlayOutcome, summarise
from traces.simulator.metrics import percentile
from traces.simulator.profiles import find, of_unloaded
from traces.simulator.simulation import Simulation
from traces.simulator.tiers import EngineProfile, prefill_seconds
from workers.processes import free_port

ROOT = Path(__file__).parents[1]
POLICIES = tuple(PlacingPolicy)
MIX = PaperMix(
    conversations=36,
    turns=(4, 4),
    first_tokens=3_000,
    first_cv=0.3,
    appended_tokens=600,
    appended_cv=0.5,
    output_tokens=64,
    output_cv=0.3,
    tool_s=0.5,
    seed=2,
)
LOAD = 0.7
TOLD_APART = 1.3
UP_LIMIT_S, DOWN_LIMIT_S, REPLAY_LIMIT_S = 600.0, 60.0, 300.0
WAIT_S = 600.0  # nobody is refused: a queue shows what a policy costs, a refusal would hide it


@dataclass(frozen=True)
class PolicyFigures:
    """p95 over conversations, seconds."""

    ttfet: float
    last_turn_tbt: float
    e2e: float


METRICS = tuple(PolicyFigures.__dataclass_fields__)


def variant(file: FleetSpec, policy: PlacingPolicy) -> FleetSpec:
    tiers = [tier.model_copy(update={"replicas": 1}) for tier in file.tiers]
    waits = {"prefiller_wait": WAIT_S, "decoder_wait": WAIT_S}
    return file.model_copy(
        update={
            "name": "live",
            "policy": policy.value,
            "tiers": tiers,
            "conversation": file.conversation.model_copy(update=waits),
        }
    )


@contextmanager
def up(fleet: FleetSpec, limit_s: float = UP_LIMIT_S) -> Iterator[str]:
    """Yields the endpoint."""
    with brought_up(fleet, limit_s) as home:
        yield serving(home).endpoint


@contextmanager
def brought_up(fleet: FleetSpec, limit_s: float = UP_LIMIT_S) -> Iterator[FleetHome]:
    """The fleet by its command line, as a person brings it up; whoever is told to end takes it down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="live-") as base:
        file, port = Path(base) / "fleet.yaml", free_port("127.0.0.1")
        file.write_text(yaml.safe_dump(fleet.model_dump(mode="json", exclude_unset=True)))
        try:
            _conserve(base, "up", str(file), "--detach", "--port", str(port), limit_s=limit_s)
            yield FleetHome.of(fleet.name, base)
        finally:
            _conserve(base, "down", fleet.name, limit_s=DOWN_LIMIT_S)


def _conserve(base: str, *arguments: str, limit_s: float) -> None:
    environment = {**os.environ, "CONSERVE_HOME": base, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise SystemExit(f"conserve {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def replayed(url: str, trace: Sequence[TraceConversation], probes: int = 0) -> Replay:
    options = ReplayOptions(url, probes=probes, time_limit_s=REPLAY_LIMIT_S, salt=f"live{len(trace)}")
    return asyncio.run(play(trace, options, ReplayWatcher()))


def profile(url: str, fleet: FleetSpec, found: Sequence[TraceConversation]) -> EngineProfile:
    """What an engine of this fleet takes, by conversations that were played alone."""
    run = replayed(url, found[:1], probes=3)
    assert run.unloaded is not None
    return of_unloaded(run.unloaded, _engine(fleet, find("laptop")))


def _engine(fleet: FleetSpec, base: EngineProfile) -> EngineProfile:
    return simulated_fleet(fleet, base).of(Role.PREFILL)[0].profile


def arriving(found: Sequence[TraceConversation], engine: EngineProfile) -> list[TraceConversation]:
    """One pattern, as fast as this machine's prefiller bears."""
    seconds = prefill_seconds(engine, round(MIX.first_tokens)) / LOAD
    return [replace(one, arrival_s=one.arrival_s * seconds) for one in workload.poisson(found, 1.0)]


def live_figures(run: Replay) -> PolicyFigures:
    unfinished = [one for one in run.conversations if one.outcome is not PlayOutcome.DONE]
    if unfinished:
        raise SystemExit(
            f"{len(unfinished)} conversations did not end: {unfinished[0].error or 'time limit'}"
        )
    spreads = summarise(run).spreads
    return PolicyFigures(*(spreads[name].at(95) for name in ("ttfet_served", "last_turn_tbt", "e2e_served")))


def simulated_figures(
    fleet: FleetSpec, engine: EngineProfile, trace: Sequence[TraceConversation]
) -> PolicyFigures:
    settings = simulation_settings(fleet, None, 0.0, 0)
    result = Simulation(simulated_fleet(fleet, engine), settings).run(trace)
    waits = [sum(turn.wait_s for turn in one.turns[1:]) for one in trace]
    return PolicyFigures(
        percentile([value - wait for value, wait in zip(result.ttfet, waits, strict=True)], 95),
        percentile(result.last_tbt, 95),
        percentile([value - wait for value, wait in zip(result.e2e, waits, strict=True)], 95),
    )


def apart(computed: dict[str, PolicyFigures], metric: str) -> list[tuple[str, str]]:
    """Pairs, the faster first, that the simulation tells apart: closer ones have no order to agree on."""
    ordered = sorted(computed, key=lambda name: float(getattr(computed[name], metric)))
    return [
        (fast, slow)
        for fast, slow in combinations(ordered, 2)
        if getattr(computed[slow], metric) >= TOLD_APART * getattr(computed[fast], metric)
    ]


def same_order(live: dict[str, PolicyFigures], metric: str, pair: tuple[str, str]) -> bool:
    fast, slow = pair
    return bool(getattr(live[fast], metric) < getattr(live[slow], metric))


def main() -> None:
    parser = command(__doc__, quick="simulates only")
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "laptop.yaml")
    options = parser.parse_args()
    file, found = load_fleet(options.fleet), workload.conversations(MIX)
    fleets = {policy.value: variant(file, policy) for policy in POLICIES}
    live: dict[str, PolicyFigures] = {}
    engine = _engine(fleets["conserve"], find("laptop"))
    for name, fleet in fleets.items() if not options.quick else ():
        print(f"{name}: bringing the fleet up", flush=True)
        with up(fleet) as url:
            if not live:
                engine = profile(url, fleet, found)
                print(f"played alone: {engine.latency}", flush=True)
            else:
                replayed(url, found[:1])  # first requests of a fresh engine are not its policy's cost
            live[name] = live_figures(replayed(url, arriving(found, engine)))
            print(f"{name}: {live[name]}", flush=True)
    trace = arriving(found, engine)
    computed = {name: simulated_figures(fleet, engine, trace) for name, fleet in fleets.items()}
    _show(live, computed)
    agree = {
        f"order_agrees_{metric}": int(all(same_order(live, metric, pair) for pair in apart(computed, metric)))
        for metric in METRICS
        if live
    }
    table = {
        "engine": asdict(engine),
        "live": {name: asdict(row) for name, row in live.items()},
        "simulated": {name: asdict(row) for name, row in computed.items()},
    }
    write_json(options.json, agree | {"table": table})


def _show(live: dict[str, PolicyFigures], computed: dict[str, PolicyFigures]) -> None:
    for metric in METRICS:
        print(f"\np95 of {metric}, s")
        for name in computed:
            seen = f"live {getattr(live[name], metric):8.3f}   " if live else ""
            print(f"  {name:20} {seen}simulated {getattr(computed[name], metric):8.3f}")
        for fast, slow in apart(computed, metric):
            told = ""
            if live:
                same = same_order(live, metric, (fast, slow))
                told = ", and live" if same else ", BUT LIVE IT IS THE OTHER WAY ROUND"
            print(f"    simulated: {fast} before {slow}{told}")


if __name__ == "__main__":
    main()
