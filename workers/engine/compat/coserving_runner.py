"""Contact of co-serving's workers with vLLM's model runner, written for one release and checked at start.

The scheduler's side is in vllm_internals.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvtransfer.compat.relied_on import ReliedOn

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"

WORKING = ReliedOn(
    signatures={
        _RUNNER: {
            "sample_tokens": ("self", "grammar_output"),
            "execute_model": ("self", "scheduler_output", "intermediate_tensors"),
            "_model_forward": (
                "self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs",
            ),
        },
        _WORKER: {
            "load_model": ("self", "load_dummy_weights"),
            "execute_model": ("self", "scheduler_output"),
            "sample_tokens": ("self", "grammar_output"),
        },
    },
    attributes={
        _RUNNER: (
            "execute_model_state", "kv_connector_output", "input_batch", "discard_request_mask",
            "model_config", "device",
        ),
    },
    # The forward pass is left from within the connector's step, which still gets its reports out.
    uses={_RUNNER: {"execute_model": ("_model_forward", "maybe_get_kv_connector_output")}},
)  # fmt: skip

Forward = Callable[..., Any]


def wrap_forward(runner: GPUModelRunner, wrapper: Callable[[Forward], Forward]) -> None:
    """Puts `wrapper` around the runner's forward pass, outside of wrappers that are there already.

    This is inside the connector's step: a forward pass that ends early still gets the step's reports out.
    """
    runner._model_forward = wrapper(runner._model_forward)


def empty_hidden_states(runner: GPUModelRunner, positions: Any) -> Any:
    """Stands in for the result of a forward pass that ended early; nothing is sampled from it."""
    import torch

    config = runner.model_config
    return torch.zeros(
        positions.shape[-1], config.get_hidden_size(), dtype=config.dtype, device=positions.device
    )


def nothing_sampled(runner: GPUModelRunner, scheduler_output: Any) -> ModelRunnerOutput:
    """The output of an iteration that ended early: no request has a token.

    The runner's sampling is skipped as a whole: it would advance random generators, and take the prompt
    logprobs of requests that have to be computed again.
    """
    if runner.device.type == "cuda":
        # The step's inputs may still be on their way out of pinned memory that the next step overwrites.
        import torch

        torch.cuda.current_stream().synchronize()
    runner.execute_model_state = None
    connector_output, runner.kv_connector_output = runner.kv_connector_output, None
    scheduled = list(scheduler_output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=scheduled,
        req_id_to_index={request: index for index, request in enumerate(scheduled)},
        kv_connector_output=connector_output,
    )


@contextmanager
def discarded_requests_unseeded(runner: GPUModelRunner) -> Iterator[None]:
    """Around sampling in the CPU build, which dies of requests that have a seed and get no token in this
    step.

    vLLM winds their generators back by an offset, which generators on the CPU do not have. Without a
    generator such a request is sampled like any other, and its own generator stays where it was.
    """
    generators = runner.input_batch.generators
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    put_aside = {int(row): generators.pop(int(row)) for row in discarded if int(row) in generators}
    try:
        yield
    finally:
        generators.update(put_aside)
