"""Iterations of a co-serving engine cost few Python calls in addition to vLLM's own."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from placement.scheduling.latency_model import BatchWork, LatencyModel
from tests.workers.coserving.model_free import ModelFreeEngine
from workers.engine.coserving.config import PROMPT_SCHEDULER, SCHEDULER_CLASS

REPOSITORY = Path(__file__).resolve().parents[3]
OURS = tuple(str(REPOSITORY / package) + "/" for package in ("workers", "kvtransfer", "placement"))
STEPS = 10
OF_THE_TEST = Counter({"StepRequest": 99, "KVCacheBlocks": 99})


@contextmanager
def calls_of_ours() -> Iterator[Counter[str]]:
    """Count this thread's calls of our functions by name, and the created dataclass objects by class."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            calls[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1
        elif code.co_name == "__init__" and code.co_filename == "<string>":
            calls[type(frame.f_locals["self"]).__name__] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


# Steps of a GPU: predicted to be too short to be worth arming.
SHORT = LatencyModel(per_token=1e-5, per_attended=0, per_context=0, constant=0.004)


def a_step(
    model: Path,
    requests: int,
    scheduler: str = SCHEDULER_CLASS,
    offline: int = 0,
) -> Counter[str]:
    """Count the calls of an iteration in which `requests` requests decode, `offline` of them offline."""
    ticks = count(1)
    engine = ModelFreeEngine(
        model, scheduler=scheduler, latency=SHORT, clock=lambda: 1000 + next(ticks) * 1e-4
    )
    for number in range(requests):
        engine.ask(f"turn{number}", [32 + number] * 70, 40, priority=int(number < offline))
    for _ in range(8):
        engine.step(0.0)
    with calls_of_ours() as calls:
        for _ in range(STEPS):
            done = engine.scheduler.schedule()
            assert done.total_num_scheduled_tokens == len(done.num_scheduled_tokens) == requests
            assert engine.scheduler.plugin("safepoint").armed == 0
            engine.deliver(done, engine.rows_of(done), [[40]] * requests)
    return Counter({name: times // STEPS for name, times in calls.items() if times >= STEPS})


@pytest.mark.parametrize("offline", [0, 1])
def test_more_decoding_requests_cause_no_more_calls_in_a_co_serving_iteration(
    small_model: Path, offline: int
) -> None:
    few, many = (a_step(small_model, requests, offline=offline) for requests in (2, 8))
    assert not many["RequestView"]
    assert sum((many - few - OF_THE_TEST).values()) == 0, (many - few).most_common(12)
    assert sum(many.values()) <= 180


def test_more_decoding_requests_cause_no_more_calls_without_co_serving(small_model: Path) -> None:
    few, many = (a_step(small_model, requests, PROMPT_SCHEDULER) for requests in (2, 8))
    assert sum((many - few - OF_THE_TEST).values()) == 0, (many - few).most_common(12)


def test_without_an_iteration_log_an_unarmed_iteration_creates_no_record(
    small_model: Path,
) -> None:
    calls = a_step(small_model, 4)
    assert not calls["IterationRecord"]
    assert not calls["requests.online"]


def test_the_recorded_work_of_a_repeated_batch_equals_the_sum_over_its_requests(small_model: Path) -> None:
    ticks = count(1)
    engine = ModelFreeEngine(small_model, latency=SHORT, clock=lambda: 1000 + next(ticks) * 1e-4)
    for number in range(6):
        engine.ask(f"turn{number}", [32 + number] * (40 + 9 * number), 12 + 7 * number, priority=number % 2)
    repeated = 0
    while engine.scheduler.requests:
        done = engine.scheduler.schedule()
        iteration = engine.scheduler.under_way[id(done)]
        rows = engine.rows_of(done)
        work = BatchWork.of((row.count, row.end - row.count) for row in rows)
        offline = [row for row in rows if row.request.priority]
        assert iteration.batch.work == work
        assert iteration.batch.offline_requests == len(offline)
        assert iteration.offline_tokens == sum(row.count for row in offline)
        repeated += iteration.repeats
        engine.deliver(done, rows, engine.forward(rows))
    assert repeated > 20
    assert not engine.lies
