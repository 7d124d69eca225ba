"""Each step of `benchmarks.gpu` that needs no vLLM also runs on a CPU, and finds its bytes unchanged."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu.results import spread
from benchmarks.gpu.runner import SEQUENCE, TORCH
from benchmarks.gpu.step import torch_step
from kvtransfer.checkpoint.cuda_mover import CudaMover

STEPS = {step.name: step for step in SEQUENCE if step.group == TORCH}


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """Restore the number of torch threads after each test, because steps change it."""
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_gpu_step_that_needs_no_vllm_runs_on_a_cpu(name: str) -> None:
    found = torch_step(STEPS[name], "cpu")
    assert found["equal"] is True
    assert all(isinstance(value, bool | int | float | str) for value in found.values())
    assert not [key for key in found if key.endswith("_failed")]


def test_a_mover_that_loads_nothing_is_reported_as_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaMover, "load", lambda self, memory, copies, at=0: copies)
    assert torch_step(STEPS["host_copies"], "cpu")["equal"] is False


def test_a_spread_has_median_p90_and_maximum_in_ms() -> None:
    figures = spread("step", [n / 1e3 for n in range(1, 12)])
    assert figures == pytest.approx({"step_ms": 6.0, "step_p90_ms": 10.0, "step_max_ms": 11.0})
