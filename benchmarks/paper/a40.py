"""The conversation paper's set-up: four A40 GPUs with Qwen3-0.6B in bf16.

"Paper" is "Observation, Not Prediction", section 5.1. The latency model is derived from two of its
statements, 25k prefilled tokens a second at a mean prompt and 1k decoded tokens a second with the KV full;
`tests/traces/simulator/test_a40_calibration.py` checks the profile against them.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings, Redisaggregation
from placement.scheduling.latency_model import BatchWork
from traces.format import TraceConversation
from traces.simulator.metrics import SimulationResult
from traces.simulator.policies import System, SystemSettings
from traces.simulator.profiles import find
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet, SimulatedTier

SATURATED_RATE = 1.634  # paper: conversations a second that fill the prefiller
INPUT_TOKENS = 25_000.0 / SATURATED_RATE  # prompt tokens of a first turn; the paper rounds them to 15k
OUTPUT_TOKENS = 1_000.0  # paper: output tokens of a conversation
COLLOCATED_CHUNK = 2_944  # paper: tokens of a chunk on collocated engines
SLO_FACTOR = 5.0  # paper: a target is 5 x the unloaded latency
LIMIT_W, CAP_W = 300.0, 200.0  # paper: power limit and power cap of a GPU

ENGINE = find("a40-qwen3-0.6b")
MIXED = (System.COLLOCATED, System.STICKY)


def tbt_target_s() -> float:
    """Return five times the duration of an iteration in which one conversation of mean length decodes."""
    context = int(INPUT_TOKENS + OUTPUT_TOKENS / 2)
    return SLO_FACTOR * ENGINE.latency.seconds(BatchWork.of([(1, context)]))


def disaggregated(cap_w: float = LIMIT_W) -> SimulatedFleet:
    """Return a fleet of one prefiller, and three decoders with a power cap."""
    decoder = ENGINE.capped(cap_w) if cap_w < LIMIT_W else ENGINE
    return SimulatedFleet(
        (SimulatedTier("prefill", Role.PREFILL, 1, ENGINE), SimulatedTier("decode", Role.DECODE, 3, decoder))
    )


def collocated(cap_w: float = LIMIT_W) -> SimulatedFleet:
    """Return a fleet of four mixed engines, three of them with a power cap."""
    engine = replace(ENGINE, chunk_tokens=COLLOCATED_CHUNK)
    capped = engine.capped(cap_w) if cap_w < LIMIT_W else engine
    return SimulatedFleet(
        (SimulatedTier("mixed", Role.MIXED, 1, engine), SimulatedTier("mixed-capped", Role.MIXED, 3, capped))
    )


def simulate(
    system: SystemSettings,
    trace: Iterable[TraceConversation],
    cap_w: float = LIMIT_W,
    rule: Redisaggregation | None = None,
    **settings: Any,
) -> SimulationResult:
    """Play a trace on the fleet of a system. First turns wait for a prefiller as long as necessary."""
    placer = PlacerSettings(max_prefill_wait_s=float("inf"), redisaggregation=rule or Redisaggregation())
    fleet = collocated(cap_w) if system.system in MIXED else disaggregated(cap_w)
    return Simulation(fleet, SimulationSettings(system, placer, **settings)).run(trace)
