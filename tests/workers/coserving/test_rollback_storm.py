"""On real vLLM: after a storm of aborts outputs equal an undisturbed run, and without a step they do not.

Each of the five steps left out is in test_rollback.py, on vLLM's scheduler without a model. Here are
the two whose absence a short storm always shows; the others need rows that meet by chance.
"""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.architectures import architecture_directory
from tests.workers.coserving.audit import AUDIT_VARIABLE
from tests.workers.coserving.cpu_overlap import overlapping
from tests.workers.coserving.storm import (
    StormResult,
    storm,
    storm_config,
    storm_shape,
)
from workers.engine.coserving.profile import coserving_engine

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


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("left_out", STEPS, ids=STEPS.values())
def test_without_one_rollback_step_outputs_differ(left_out: str, small_model: Path, tmp_path: Path) -> None:
    assert red(small_model, left_out, tmp_path / "audit")
