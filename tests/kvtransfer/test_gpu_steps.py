"""Each step of `benchmarks.gpu` that needs no vLLM runs on a CPU, and its bytes are equal."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.gpu import aborts, host_tier_copies
from benchmarks.gpu.batch_memcpy import AT_ANY_TIME, batch_memcpy, pointers
from benchmarks.gpu.results import spread
from benchmarks.gpu.runner import SEQUENCE, TORCH
from benchmarks.gpu.step import torch_step
from kvtransfer.checkpoint.cuda_mover import CudaMover

STEPS = {step.name: step for step in SEQUENCE if step.group == TORCH}
NEEDS_CUDA = {"vllm_copy_blocks"}


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """Set the number of torch threads to one for the steps, and restore it for other tests."""
    usual = torch.get_num_threads()
    yield
    torch.set_num_threads(usual)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(STEPS.keys() - NEEDS_CUDA))
def test_a_step_runs_on_a_cpu_and_its_bytes_are_equal(name: str) -> None:
    found = torch_step(STEPS[name], "cpu")
    assert found["equal"] is True
    assert all(isinstance(value, bool | int | float | str) for value in found.values())
    assert not [key for key in found if key.endswith("_failed")]


def test_an_unmeasurable_batch_memcpy_of_vllm_reports_the_reason() -> None:
    assert "needs CUDA" in str(host_tier_copies.vllm_copy_blocks("cpu")["failed_because"])


def test_a_mover_that_loads_nothing_is_reported_as_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaMover, "load", lambda self, memory, copies, at=0: copies)
    assert torch_step(STEPS["host_copies"], "cpu")["equal"] is False


def test_input_that_the_device_reads_too_late_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is late: `seen` is the pinned input itself, read after the step."""
    made: list[torch.Tensor] = []

    def full(size: tuple[int], value: int, **options: object) -> torch.Tensor:
        made.append(torch.ones(size, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(torch, "full", full)
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: made[-1] if made else clone(self))
    found = aborts.aborted_steps("cpu")
    assert found["abort_at_0_64B_idle_unsynchronised_wrong"] == found["abort_inputs_rounds"]
    assert found["equal"] is False, "a synchronised step was wrong, too"


def test_pointers_follow_both_layouts_of_a_block() -> None:
    by_layer = torch.arange(3 * 4 * 8, dtype=torch.uint8).view(3, 4, 8)
    rows = torch.zeros(2, 3, 8, dtype=torch.uint8)
    batch = batch_memcpy("cpu")
    batch.copy(pointers(rows, [0, 1]), pointers(by_layer.transpose(0, 1), [3, 1]), 8, AT_ANY_TIME)
    assert torch.equal(rows, by_layer[:, [3, 1]].transpose(0, 1))
    assert pointers(rows, [1]).dtype == np.uint64


def test_a_spread_has_median_p90_and_maximum_in_ms() -> None:
    figures = spread("step", [n / 1e3 for n in range(1, 12)])
    assert figures == pytest.approx({"step_ms": 6.0, "step_p90_ms": 10.0, "step_max_ms": 11.0})
