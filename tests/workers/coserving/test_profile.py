"""The profiling grid stays within the engine's limits, and the store gets the measurements."""

from pathlib import Path

import pytest

from placement.scheduling.latency_model import BatchWork, LatencyModel, Sample
from workers.engine.coserving.iterations import IterationLog, IterationRecord, read_iterations
from workers.engine.coserving.profile import Grid, profile_of, safepoint_every, samples_of

GRID = Grid(max_tokens=2048, max_context=8192, max_requests=64, block_tokens=32)


def record(new: int, seconds: float, aborted: bool = False) -> IterationRecord:
    return IterationRecord(1.0, seconds, 0.1, new, new * new, new, 1, 0, 0, 0, 0, aborted)


def quartile(records: list[IterationRecord], repeats: int) -> list[tuple[int, float]]:
    return [(sample.work.new_tokens, sample.seconds) for sample in samples_of(records, repeats)]


def test_every_point_of_the_profiling_grid_is_within_the_engines_limits() -> None:
    points = list(GRID.points())
    assert len(points) > 20
    for point in points:
        assert point.new + point.context + 8 <= GRID.max_context
        assert point.new <= GRID.max_tokens
        assert point.requests <= GRID.max_requests


def test_the_profiling_grid_reaches_the_largest_prefill_and_the_largest_batch() -> None:
    points = set(GRID.points())
    assert max(point.new for point in points) == GRID.max_tokens
    assert max(point.requests for point in points) == GRID.max_requests


def test_each_shape_has_one_sample_that_was_neither_disturbed_nor_aborted() -> None:
    times = (0.010, 0.500, 0.011, 0.012, 0.013)
    records = [record(64, seconds) for seconds in times] + [record(64, 0.001, aborted=True)] * 5
    assert quartile(records, repeats=5) == [(64, 0.011)]


def test_samples_merge_nearly_equal_batches_and_leave_out_batches_that_were_not_repeated() -> None:
    records = [record(1000, 0.020), record(1001, 0.021), record(1002, 0.022), record(400, 0.001)]
    assert quartile(records, repeats=3) == [(1000, 0.020)]


def test_a_profile_has_the_layer_time_of_the_largest_batch() -> None:
    model = LatencyModel(1e-4, 1e-8, 1e-7, 5e-3)
    works = [BatchWork.of([(point.new, point.context)] * point.requests) for point in GRID.points()]
    found = profile_of([Sample(work, model.seconds(work)) for work in works], layers=10, now=7.0)
    assert found.errors[0].p90 < 0.01
    assert found.layer_seconds == pytest.approx(max(map(model.seconds, works)) / 10)


@pytest.mark.parametrize(
    ("layer_s", "check_s", "every"), [(5e-3, 2e-7, 1), (1e-3, 2e-5, 4), (1e-6, 2e-5, 36), (0.0, 2e-5, 1)]
)
def test_safepoint_checks_cost_at_most_half_a_percent(layer_s: float, check_s: float, every: int) -> None:
    assert safepoint_every(layer_s, check_s, 36) == every


def test_a_growing_iteration_log_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = IterationLog(str(path))
    log.write(record(1, 0.1))
    log.write(record(2, 0.2))
    with path.open("a") as file:
        file.write('{"at": 1.0, "sec')
    assert [r.new_tokens for r in read_iterations(path)] == [1, 2]
    assert read_iterations(tmp_path / "none") == []
