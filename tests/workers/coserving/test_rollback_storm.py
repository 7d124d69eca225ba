"""After a storm of aborts on real vLLM, outputs equal those of an undisturbed run.

test_rollback.py leaves out each of the five steps of the roll-back, on vLLM's scheduler without a model. Here
one step is left out, to show that the storm finds this fault.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.cpu_overlap import overlapping
from benchmarks.harness.standalone_engine import coserving_engine
from tests.support import engine_device
from tests.support.architectures import architecture_directory
from tests.support.warm_process import call_warm
from tests.workers.coserving.audit import AUDIT_VARIABLE
from tests.workers.coserving.storm import (
    StormResult,
    storm,
    storm_config,
    storm_shape,
)

pytestmark = pytest.mark.engine
CRIPPLED = "tests.workers.coserving.crippled."


def in_warm_process(*arguments: Any, **limits: Any) -> StormResult:
    """Return the result of `_storm` on an engine whose processes import nothing anew."""
    return call_warm(_run_storm, arguments, limits)


def _run_storm(arguments: Sequence[Any], limits: Mapping[str, Any]) -> StormResult:
    return asyncio.run(_storm(*arguments, **limits))


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
    environment = {AUDIT_VARIABLE: str(audit), **engine_device.environment()}
    shape = storm_shape(
        model, overlaps, blocks=blocks, scheduler=CRIPPLED + scheduler, environment=environment
    )
    with overlapping() if overlaps else nullcontext():
        async with coserving_engine(shape, storm_config()) as engine:
            return await storm(engine, aborts, preemptions, **limits)


def finds_a_fault(model: Path, scheduler: str, audit: Path) -> bool:
    """Return whether a storm finds a wrong output, a stalled request, an audit record or a dead engine."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        result = in_warm_process(model, scheduler, audit, 150, 20, stall_s=20.0, until_wrong=True)
    except (EngineDeadError, EngineGenerateError):
        return True
    return not result.ok or audit.exists()


@pytest.mark.parametrize(
    ("windows", "blocks", "overlaps"),
    [
        pytest.param(False, 65, False, id="one group-synchronous"),
        pytest.param(False, 65, True, id="one group-asynchronous"),
        pytest.param(True, 110, True, id="windows-asynchronous"),
    ],
)
def test_outputs_after_a_storm_of_aborts_equal_those_of_an_undisturbed_run(
    windows: bool, blocks: int, overlaps: bool, small_model: Path, tmp_path: Path
) -> None:
    model, audit = architecture_directory("gemma3_text") if windows else small_model, tmp_path / "audit"
    result = in_warm_process(model, "Audited", audit, 20, 6, blocks, overlaps, limit_s=300.0)
    assert bool(result.overlapped) == overlaps
    assert result.aborts >= 20
    assert result.preemptions >= 6
    assert result.wrong == []
    assert result.stalled == []
    assert not audit.exists(), audit.read_text()


@pytest.mark.slow
def test_outputs_differ_if_a_step_of_the_rollback_is_left_out(small_model: Path, tmp_path: Path) -> None:
    """Without the step, requests hit blocks in the prefix cache that were never computed."""
    assert finds_a_fault(small_model, "WithoutEvictWritten", tmp_path / "audit")
