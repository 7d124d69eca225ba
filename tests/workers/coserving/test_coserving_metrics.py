"""Every count of a co-serving engine is one that `/metrics` knows: an unknown name stops the front end."""

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.metrics import COUNTERS as CONNECTOR_COUNTERS
from placement.latency import BatchWork
from placement.serving.state import RunningBatch
from workers.coserving.metrics import COUNTERS, HISTOGRAMS
from workers.coserving.scheduler import CoServingScheduler
from workers.coserving.step import Step


def counted(online: int, offline: int, aborted: bool) -> Any:
    half = SimpleNamespace(counts=Counter(), observations=defaultdict(list))
    engine: Any = SimpleNamespace(
        _flag=SimpleNamespace(abort_wait_s=lambda: 0.004),
        connector=SimpleNamespace(scheduler_half=lambda part: half),
        _watch=SimpleNamespace(take_counts=lambda: Counter(coserving_signals=1, coserving_unjudged=1)),
    )
    batch = RunningBatch(BatchWork(40), BatchWork(10), offline, online, 0.1, 0.0, None)
    step = Step(0.0, batch, 7, (), 30, 1, 50, 5, aborted, 4)
    CoServingScheduler._count(engine, step, 0.2, 2)
    return half


@pytest.mark.parametrize(
    ("online", "offline", "rows"), [(1, 0, "online"), (1, 1, "mixed"), (0, 2, "offline")]
)
@pytest.mark.parametrize("aborted", [False, True])
def test_what_is_counted_is_declared(online: int, offline: int, rows: str, aborted: bool) -> None:
    half = counted(online, offline, aborted)
    counts = half.counts
    assert half.observations.keys() <= HISTOGRAMS.keys()
    assert half.observations["coserving_abort_wait"] == ([0.004] if aborted else [])
    assert half.observations["coserving_model_error"] == ([] if aborted else [0.5])
    for name in counts:
        key, _, label = name.partition(".")
        assert bool(COUNTERS[key].label) == bool(label)
    assert counts[f"coserving_iterations.{rows}"] == 1
    assert counts["coserving_aborts"] == aborted
    assert counts["coserving_offline_tokens"] == (0 if aborted else 30)
    assert counts["coserving_online_tokens"] == (0 if aborted else 10)
    assert counts["coserving_offline_tokens_lost.abort"] == (30 if aborted else 0)
    assert counts["coserving_offline_tokens_lost.preemption"] == 5


def test_names_are_not_taken_by_the_connector() -> None:
    assert not COUNTERS.keys() & CONNECTOR_COUNTERS.keys()
    assert not {c.name for c in COUNTERS.values()} & {c.name for c in CONNECTOR_COUNTERS.values()}
