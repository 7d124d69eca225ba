"""The profile of `benchmarks.peers` adds up the events of engines within a part of a play."""

import importlib.metadata
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import engine_probe, profile
from benchmarks.peers.engine_probe import MODEL, SCHEDULE, STORE, WAIT, ProbeEvent


def iteration(at: float, decodes: int, prompt_tokens: int, cpu_s: float) -> list[ProbeEvent]:
    scheduled = ProbeEvent(SCHEDULE, at, 0.01, 0.01, decodes, int(prompt_tokens > 0), prompt_tokens)
    return [scheduled, ProbeEvent(MODEL, at + 0.5, 0.4, cpu_s)]


def test_a_profile_row_counts_only_the_iterations_and_time_of_its_part_of_a_play() -> None:
    found = [
        *iteration(1.0, 1, 0, 0.3),  # before the part begins
        *iteration(10.0, 4, 0, 0.3),
        *iteration(12.0, 4, 100, 0.3),
        *iteration(14.0, 0, 300, 0.3),
        ProbeEvent(STORE, 15.0, 2.0, 0.5),
        ProbeEvent(WAIT, 18.0, 2.0, 0.0),
        ProbeEvent(WAIT, 24.0, 6.0, 0.0),  # ends after the part
        ProbeEvent(WAIT, 19.0, 0.001, 0.0),  # a poll of the queue
    ]
    row = profile.row("ours", "real at 1.5", "decode-0", found, 9.0, 19.0)
    assert (row.iterations, row.tokens, row.with_prompts, row.prompt_tokens_each) == (3, 408, 2, 200.0)
    assert row.by_size == (1, 0, 1, 1, 0)
    assert (row.model, row.model_cpu, row.copies_cpu) == (0.12, 0.09, 0.05)
    assert row.waiting == pytest.approx(0.3), "two seconds, and one of six"
    assert row.model + row.scheduling + row.waiting + row.other == pytest.approx(1.0)


def test_the_cost_of_an_iteration_is_fitted_to_iterations_of_different_sizes() -> None:
    sizes = [(1, 0), (8, 0), (4, 100), (0, 300), (2, 50), (16, 200)]
    found = [
        event
        for number, (decodes, prompt) in enumerate(sizes)
        for event in iteration(float(number), decodes, prompt, 0.02 + 0.001 * decodes + 0.0001 * prompt)
    ]
    cost = profile.cost([found])
    assert (cost.constant_s, cost.decode_s, cost.prompt_token_s) == pytest.approx((0.02, 0.001, 0.0001))
    assert profile.cost([]).constant_s == 0.0


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    environment = engine_probe.plugin_folder(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(environment["PYTHONPATH"].partition(":")[0])
    yield tmp_path / engine_probe.EVENTS
    engine_probe.open_files.clear()


def test_vllm_finds_the_profiling_plugin_in_its_folder(written: Path) -> None:
    (plugin,) = importlib.metadata.entry_points(group=engine_probe.GROUP, name="conserve_probe")
    assert plugin.load() is engine_probe.install


def test_a_method_with_a_probe_writes_an_event_and_returns_its_result(written: Path) -> None:
    class Output:
        def __init__(self) -> None:
            self.num_scheduled_tokens = {"a": 1, "b": 200, "c": 1}

    class Scheduler:
        def schedule(self) -> Output:
            return Output()

    scheduler = Scheduler()
    engine_probe.time_calls(scheduler, "schedule", SCHEDULE, engine_probe.scheduled_tokens)
    assert isinstance(scheduler.schedule(), Output)
    (file,) = written.iterdir()
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["decodes"], line["prompts"], line["prompt_tokens"]) == (2, 1, 200)
    (event,) = profile.events(written, [int(file.stem), 1])
    assert event.kind == SCHEDULE and event.seconds >= 0.0


def test_an_engine_is_the_process_that_listens_at_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = profile.processes_of({"plain-0": f"http://127.0.0.1:{port}", "gone": "http://127.0.0.1:1"})
    assert list(found) == ["plain-0"]
