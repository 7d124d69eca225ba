"""The same systems on real agent conversations, where the paper's assumptions do not hold.

Prefixes break, later turns append more than first turns, and people think for minutes: a conversation is idle
for most of its life. Lengths are divided by 8, so that the longest contexts fit the paper's decoders; waits
are as recorded. Systems differ in where turns run and in what becomes of the KV of idle conversations.
Prefillers keep prefixes, as vLLM does unless it is told otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.paper import a40
from benchmarks.paper.a40 import A40
from placement.routing.placer_settings import PlacerSettings, Redisaggregation
from traces import NotATrace, generators, importers
from traces.format import TraceConversation
from traces.format import load as load_trace
from traces.simulator.kv import Pressure
from traces.simulator.metrics import SimulationResult, percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "agents.jsonl.gz"
SHRINK = 8
LARGE_APPEND = 8_192 // SHRINK  # twice the fleet file's default, in shrunk tokens
LONGEST = int(a40.KV_TOKENS * 0.4)
PARK_AFTER_S = 60.0  # the fleet file's default
LINGER_S = 1800.0  # real agents do not say that they are done: the fleet file's default


@dataclass(frozen=True)
class Contender:
    name: str
    system: System
    pressure: Pressure
    min_share: float = Redisaggregation().min_share
    idle_reported: bool = True


CONTENDERS = (
    Contender("ours", System.PREFILLER, Pressure.PARK),
    Contender("  every large append through the prefiller", System.PREFILLER, Pressure.PARK, min_share=0.0),
    Contender("  never again through the prefiller", System.STRICT, Pressure.PARK),
    Contender("  idle KV counted as in use", System.PREFILLER, Pressure.PARK, idle_reported=False),
    Contender("the paper's rule: pinned on the decoder for life", System.STRICT, Pressure.PIN),
    Contender("pinned to the decoder, plain prefix cache", System.STRICT, Pressure.DROP),
    Contender("AMPD, 10 % wrong, parked", System.AMPD, Pressure.PARK),
    Contender("KV pulled back to the prefiller every turn", System.PULL_BACK, Pressure.PARK),
    Contender("collocated, parked", System.COLLOCATED, Pressure.PARK),
    Contender("collocated, plain prefix cache", System.COLLOCATED, Pressure.DROP),
    Contender("sticky per turn, parked", System.STICKY, Pressure.PARK),
    Contender("sticky per turn, plain prefix cache", System.STICKY, Pressure.DROP),
    Contender("full disaggregation, parked", System.FULL_DISAGGREGATION, Pressure.PARK),
)


@dataclass(frozen=True)
class RealRow:
    name: str
    ttfet_p50_s: float
    ttfet_p95_s: float
    turn_ttft_p50_s: float
    turn_ttft_p95_s: float
    turn_ttft_p99_s: float
    turn_tbt_p50_ms: float
    turn_tbt_p95_ms: float
    slow_turns: float  # TTFT above 5 x the mean unloaded one of its kind (first, later)
    recomputed_share: float
    transfers: int
    gate_wait_mean_s: float
    tokens_per_joule: float


def load(path: Path, rate: float, seed: int = 0) -> list[TraceConversation]:
    """Conversations at Poisson arrivals, each up to the turn that would not fit."""
    try:
        found = load_trace(path).conversations
    except NotATrace:
        found = importers.import_files([path]).conversations
    alone = (replace(conversation, parent=None) for conversation in found if conversation.parent is None)
    shrunk = generators.scale(alone, generators.Scale(lengths=1 / SHRINK))
    fitting = tuple(generators.fit(shrunk, LONGEST))
    return list(generators.arriving(fitting, generators.poisson(rate, generators.stream(seed, "arrivals"))))


def play(contender: Contender, trace: list[TraceConversation], calibration: A40) -> SimulationResult:
    rule = Redisaggregation(above_tokens=LARGE_APPEND, min_share=contender.min_share)
    settings = SimulationSettings(
        SystemSettings(contender.system),
        PlacerSettings(max_prefill_wait_s=float("inf"), redisaggregation=rule),
        pressure=contender.pressure,
        park_after_s=PARK_AFTER_S,
        linger_s=LINGER_S,
        prefillers_cache=True,
        idle_reported=contender.idle_reported,
    )
    mixed = contender.system in (System.COLLOCATED, System.STICKY)
    fleet = (a40.collocated if mixed else a40.disaggregated)(calibration)
    return Simulation(fleet, settings).run(trace)


def table(trace: list[TraceConversation], calibration: A40) -> Iterator[RealRow]:
    lonely = [replace(conversation, arrival_s=1e7 * i) for i, conversation in enumerate(trace)]
    limits = _limits(play(CONTENDERS[0], lonely, calibration))
    for contender in CONTENDERS:
        yield _row(contender.name, play(contender, trace, calibration), limits)


def _limits(unloaded: SimulationResult) -> tuple[float, float]:
    """5 x the mean unloaded TTFT of first and of later turns."""
    ttft = np.asarray(unloaded.recorder.turn_ttft)
    first = np.asarray(unloaded.recorder.turn_is_first, dtype=bool)
    return a40.SLO_FACTOR * float(ttft[first].mean()), a40.SLO_FACTOR * float(ttft[~first].mean())


def _row(name: str, result: SimulationResult, limits: tuple[float, float]) -> RealRow:
    recorder, totals = result.recorder, result.totals
    ttft = np.asarray(recorder.turn_ttft)
    tbt = np.asarray(recorder.turn_tbt)
    tbt = tbt[~np.isnan(tbt)]
    first = np.asarray(recorder.turn_is_first, dtype=bool)
    return RealRow(
        name,
        percentile(result.ttfet, 50),
        percentile(result.ttfet, 95),
        percentile(ttft, 50),
        percentile(ttft, 95),
        percentile(ttft, 99),
        percentile(tbt, 50) * 1e3,
        percentile(tbt, 95) * 1e3,
        float(np.mean(np.where(first, ttft > limits[0], ttft > limits[1]))),
        totals.recomputed_tokens / totals.needed_tokens,
        totals.transfers,
        totals.gate_wait_s / totals.conversations,
        totals.tokens_per_joule,
    )
