"""Steps of a co-serving engine cost the host few Python calls besides vLLM's own."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from tests.workers.coserving.model_free import ModelFreeEngine
from workers.engine.coserving.config import PROMPT_SCHEDULER, SCHEDULER_CLASS

REPOSITORY = Path(__file__).resolve().parents[3]
OURS = tuple(str(REPOSITORY / package) + "/" for package in ("workers", "kvtransfer", "placement"))
STEPS = 10


@contextmanager
def calls_of_ours() -> Iterator[Counter[str]]:
    """Return this thread's calls by module and name, and created dataclass objects by class."""
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


def a_step(model: Path, requests: int, scheduler: str = SCHEDULER_CLASS) -> Counter[str]:
    """Return the calls of a step in which so many requests decode and none waits."""
    engine = ModelFreeEngine(model, scheduler=scheduler)
    for number in range(requests):
        engine.ask(f"turn{number}", [32 + number] * 70, 40, priority=0)
    for _ in range(8):
        engine.step(0.0)
    with calls_of_ours() as calls:
        for _ in range(STEPS):
            done = engine.scheduler.schedule()
            assert done.total_num_scheduled_tokens == len(done.num_scheduled_tokens) == requests
            engine.deliver(done, engine.rows_of(done), [[40]] * requests)
    return Counter({name: count // STEPS for name, count in calls.items() if count >= STEPS})


def test_a_request_that_decodes_costs_a_step_one_view_and_a_bounded_number_of_calls(
    small_model: Path,
) -> None:
    few, many = a_step(small_model, 2), a_step(small_model, 8)
    a_request = {name: (many[name] - few[name]) / 6 for name in many}
    assert a_request["RequestView"] == 1
    assert a_request["BatchWork"] == 0  # sums are made once a step
    calls = sum(a_request.values())
    assert calls <= 45, sorted(a_request.items(), key=lambda one: -one[1])[:12]


def test_without_co_serving_nothing_is_planned_for_requests_that_decode(small_model: Path) -> None:
    few, many = (a_step(small_model, count, PROMPT_SCHEDULER) for count in (2, 8))
    assert not many["RequestView"]
    assert sum((many - few).values()) / 6 <= 12, (many - few).most_common(12)


def test_a_step_that_cannot_be_aborted_publishes_nothing_and_makes_no_record_without_a_log(
    small_model: Path,
) -> None:
    calls = a_step(small_model, 4)
    assert not calls["IterationRecord"]
    assert calls["requests.online"] == 1  # the plan's, for those that wait
