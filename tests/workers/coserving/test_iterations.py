"""Every counter of a co-serving engine is declared, because an unknown name would stop vLLM's front end."""

from collections import Counter, defaultdict

import pytest

from kvtransfer.metrics import COUNTERS as CONNECTOR_COUNTERS
from placement.scheduling.interface import RunningBatch
from placement.scheduling.latency_model import BatchWork
from workers.engine.coserving.iterations import COUNTERS, HISTOGRAMS, PendingIteration, count, observe


def counted(online: int, offline: int, aborted: bool) -> tuple[Counter[str], dict[str, list[float]]]:
    counts: Counter[str] = Counter()
    observations: defaultdict[str, list[float]] = defaultdict(list)
    batch = RunningBatch(BatchWork(40), BatchWork(10), offline, online, 0.1, 0.0, None)
    iteration = PendingIteration(0.0, batch, 7, (), 30, 1, 50, 5, aborted, 4)
    count(iteration, counts, 0.2, 2)
    observe(iteration, observations, 0.2, 0.004)
    return counts, observations


@pytest.mark.parametrize(
    ("online", "offline", "classes"), [(1, 0, "online"), (1, 1, "mixed"), (0, 2, "offline")]
)
@pytest.mark.parametrize("aborted", [False, True])
def test_every_counter_of_an_iteration_is_declared(
    online: int, offline: int, classes: str, aborted: bool
) -> None:
    counts, observations = counted(online, offline, aborted)
    assert observations.keys() <= HISTOGRAMS.keys()
    assert observations["coserving_abort_wait"] == ([0.004] if aborted else [])
    assert observations["coserving_model_error"] == ([] if aborted else [0.5])
    for name in counts:
        key, _, label = name.partition(".")
        assert bool(COUNTERS[key].label) == bool(label)
    assert counts[f"coserving_iterations.{classes}"] == 1
    assert counts["coserving_aborts"] == aborted
    assert counts["coserving_offline_tokens"] == (0 if aborted else 30)
    assert counts["coserving_online_tokens"] == (0 if aborted else 10)
    assert counts["coserving_offline_tokens_lost.abort"] == (30 if aborted else 0)
    assert counts["coserving_offline_tokens_lost.preemption"] == 5


def test_co_serving_counters_have_other_names_than_connector_counters() -> None:
    assert not COUNTERS.keys() & CONNECTOR_COUNTERS.keys()
    assert not {c.name for c in COUNTERS.values()} & {c.name for c in CONNECTOR_COUNTERS.values()}
