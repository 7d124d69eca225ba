"""Access of our worker to private names of vLLM's model runner, which are checked when an engine starts."""

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
                "self",
                "input_ids",
                "positions",
                "intermediate_tensors",
                "inputs_embeds",
                "model_kwargs",
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
            "execute_model_state",
            "kv_connector_output",
            "input_batch",
            "discard_request_mask",
            "model_config",
            "device",
        ),
    },
    # The connector's part of an iteration encloses the forward pass, and reports even if the pass ends early.
    uses={_RUNNER: {"execute_model": ("_model_forward", "maybe_get_kv_connector_output")}},
)

Forward = Callable[..., Any]


def wrap_forward(runner: GPUModelRunner, wrapper: Callable[[Forward], Forward]) -> None:
    """Put `wrapper` around the runner's forward pass, outside all wrappers that it already has.

    The connector's calls before and after a pass stay outside of it.
    """
    runner._model_forward = wrapper(runner._model_forward)


def empty_hidden_states(runner: GPUModelRunner, positions: Any) -> Any:
    """Return a placeholder for the result of a pass that ended early, from which nothing is sampled."""
    import torch

    config = runner.model_config
    return torch.zeros(
        positions.shape[-1], config.get_hidden_size(), dtype=config.dtype, device=positions.device
    )


def nothing_sampled(runner: GPUModelRunner, scheduler_output: Any) -> ModelRunnerOutput:
    """Return the output of an iteration that ended early: no request gets a token.

    The runner's sampling is skipped as a whole. It would advance random generators, and take prompt logprobs
    of requests that have to be computed again.
    """
    if runner.device.type == "cuda":
        # Inputs may still be on their way from pinned memory, which the next iteration overwrites.
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
    """Hide the random generators of requests that get no token in this iteration while the CPU build samples.

    vLLM would rewind these generators by an offset, which raises on CPUs. A hidden generator keeps its state,
    and its request is sampled without a seed, which does no harm because the token is discarded.
    """
    generators = runner.input_batch.generators
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    put_aside = {int(row): generators.pop(int(row)) for row in discarded if int(row) in generators}
    try:
        yield
    finally:
        generators.update(put_aside)
