"""An iteration that is aborted at its first layers ends after its inputs were copied to the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.device import LateCuda
from workers.engine.compat.coserving_runner import nothing_sampled


def test_an_aborted_iteration_ends_after_its_inputs_were_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies from vLLM's pinned input buffers run late, and the next iteration overwrites these buffers."""
    cuda = LateCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    pinned, device = torch.ones(4), torch.zeros(4)
    cuda.compute.launch(lambda: device.copy_(pinned))
    runner: Any = SimpleNamespace(
        device=torch.device("cuda"), execute_model_state=object(), kv_connector_output="reports"
    )
    result = nothing_sampled(runner, SimpleNamespace(num_scheduled_tokens={"a": 4}))
    pinned.zero_()
    cuda.compute.finish()
    assert device.tolist() == [1.0] * 4
    assert result.req_ids == ["a"] and result.sampled_token_ids == []
    assert result.kv_connector_output == "reports"
