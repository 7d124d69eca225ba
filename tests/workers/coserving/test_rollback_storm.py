"""On real vLLM: after a storm of aborts outputs equal an undisturbed run, and without a step they do not.

Each of the five steps left out is in test_rollback.py, on vLLM's scheduler without a model. Here are
the two whose absence a short storm always shows; the others need rows that meet by chance.
"""

import asyncio
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.coserving.cpu_overlap import overlapping
from benchmarks.coserving.storm import (
    CALM,
    StormRequest,
    StormResult,
    run_all,
    storm,
    storm_config,
    storm_shape,
)
from placement.scheduling.interface import ServingSettings, TurnTargets
from tests.support.architectures import architecture_directory
from tests.workers.coserving.audit import AUDIT_VARIABLE
from workers.coserving.profile import coserving_engine

CRIPPLED = "tests.workers.coserving.crippled."
STEPS = {
    "WithoutRewindComputed": "every row believes it computed what it did not",
    "WithoutEvictWritten": "others hit blocks that nobody computed",
}


async def _storm(
    model: Path,
    scheduler: str,
    audit: Path,
    aborts: int,
    preemptions: int,
    blocks: int = 65,
    overlaps: bool = False,
    **limits: Any,
) -> StormResult:
    environment = {AUDIT_VARIABLE: str(audit)}
    shape = storm_shape(
        model, overlaps, blocks=blocks, scheduler=CRIPPLED + scheduler, environment=environment
    )
    with overlapping() if overlaps else nullcontext():
        async with coserving_engine(shape, storm_config()) as engine:
            return await storm(engine, aborts, preemptions, **limits)


def red(model: Path, scheduler: str, audit: Path) -> bool:
    """Whether anything shows: a wrong output, a request that never ends, other records, a dead engine."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        result = asyncio.run(_storm(model, scheduler, audit, 150, 20, stall_s=20.0, until_wrong=True))
    except (EngineDeadError, EngineGenerateError):
        return True
    return not result.ok or audit.exists()


@pytest.mark.engine
@pytest.mark.parametrize("overlaps", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(("windows", "blocks"), [(False, 65), (True, 110)], ids=["one group", "windows"])
def test_outputs_equal_an_undisturbed_run(
    windows: bool, blocks: int, overlaps: bool, small_model: Path, tmp_path: Path
) -> None:
    model, audit = architecture_directory("gemma3_text") if windows else small_model, tmp_path / "audit"
    result = asyncio.run(_storm(model, "Audited", audit, 20, 6, blocks, overlaps, limit_s=300.0))
    assert bool(result.overlapped) == overlaps
    assert result.aborts >= 20
    assert result.preemptions >= 6
    assert result.wrong == []
    assert result.stalled == []
    assert not audit.exists(), audit.read_text()


def talk(name: str, tokens: int, queue_weight: float = 0.0) -> StormRequest:
    rng = random.Random(name)
    prompt = tuple(rng.randint(32, 120) for _ in range(tokens))
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    return StormRequest(name, prompt, params, priority=0, queue_weight=queue_weight)


@pytest.mark.engine
def test_prompts_are_left_within_an_iteration_for_a_turn_of_a_better_class(
    small_model: Path, tmp_path: Path
) -> None:
    """Nothing is offline, and nobody's target is at stake: only the class says who goes first."""
    lesser = [talk(f"lesser{number}", 900) for number in range(12)]
    better = [talk(f"better{number}", 20, queue_weight=8.0) for number in range(12)]

    async def run() -> tuple[dict[str, Any], dict[str, Any], int, int]:
        audit = {AUDIT_VARIABLE: str(tmp_path / "audit")}
        shape = storm_shape(small_model, blocks=400, scheduler=CRIPPLED + "Audited", environment=audit)
        slo = TurnTargets(ttft_s=600.0, tbt_s=10.0)
        async with coserving_engine(
            shape, replace(storm_config(), serving=ServingSettings(slo=slo))
        ) as engine:
            calm = await run_all(engine, [*lesser, *better], CALM, 1.0)
            alike = sum(record.aborted for record in engine.iterations())
            await engine.empty()
            got = await run_all(engine, [*lesser, *better], "classes", 3.0)
            return calm, got, alike, sum(record.aborted for record in engine.iterations())

    calm, got, alike, aborts = asyncio.run(run())
    assert alike == 0
    assert aborts > 0
    assert got == calm
    assert not (tmp_path / "audit").exists()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("left_out", STEPS, ids=STEPS.values())
def test_without_one_step_it_goes_wrong(left_out: str, small_model: Path, tmp_path: Path) -> None:
    assert red(small_model, left_out, tmp_path / "audit")
