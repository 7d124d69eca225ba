"""Patch of vLLM's graph dispatcher, so that steps with work between layers do not run as one CUDA graph.

Replaying a whole graph calls no Python, so a safepoint would not check its flag, and no exported layer would
become readable. A step in which a plugin has work between layers runs with piecewise graphs, or without
graphs if there are none of its size. Every other step runs as in plain vLLM. The choice depends only on the
scheduler sides' orders (`kvtransfer/plugins.py`), which are the same on all ranks. Special cases:

* Capture, warm-up and idle ranks of a data-parallel engine get no orders, so they use whole graphs.
* For attention without whole graphs, LoRA, layers with states, and models that are not compiled, vLLM decides
  which graphs exist; this module only excludes whole graphs from a step. Speculative decoding is refused
  beside co-serving and transfers.
* With `enforce_eager` and on the CPU build there are no graphs, and nothing is patched.
* FlashInfer keeps a wrapper with 8 MiB on the device for each size of a decode batch. That would be too many
  wrappers for steps that run in pieces, so all steps have piecewise graphs.
* The V2 runner chooses a step's graph before it passes orders to workers, so all steps have piecewise graphs.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Set
from typing import Any

import vllm.envs as envs
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from kvtransfer.compat.relied_on import ReliedOn, differences

logger = logging.getLogger("conserve.kvtransfer")

_DISPATCHER = "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_MIXIN = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"

GRAPHS = ReliedOn(
    signatures={
        _DISPATCHER: {
            "dispatch": (
                "self",
                "num_tokens",
                "uniform_decode",
                "has_lora",
                "num_active_loras",
                "valid_modes",
                "invalid_modes",
            ),
        },
    },
    attributes={
        _RUNNER: ("cudagraph_dispatcher",),
        "vllm.forward_context:ForwardContext": ("cudagraph_runtime_mode",),
    },
    uses={
        # Workers get orders before a step's graph is chosen, and the orders are bound after that.
        _RUNNER: {
            "execute_model": (
                "handle_preemptions",
                "_determine_batch_execution_and_padding",
                "set_forward_context",
                "maybe_get_kv_connector_output",
            ),
            "_determine_batch_execution_and_padding": ("cudagraph_dispatcher", "dispatch"),
        },
        _MIXIN: {"_get_kv_connector_output": ("bind_connector_metadata",)},
        _DISPATCHER: {"dispatch": ("FULL", "cudagraph_keys")},
    },
)

FLASHINFER = "FlashInfer would keep a wrapper for each batch size of piecewise steps"
V2_RUNNER = (
    "vLLM's V2 model runner chooses a step's graph before connectors get its orders "
    "(set VLLM_USE_V2_MODEL_RUNNER=0)"
)


def pieces_for_all_steps() -> bool:
    """Return whether all steps need piecewise graphs: yes, unless the environment selects the V1 runner.

    vLLM may choose the V2 runner although V1 is selected (for watermarks); the worker checks that later.
    """
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return False
    logger.warning("all steps have piecewise CUDA graphs, if any: %s", V2_RUNNER)
    return True


def leave_out_whole_graphs(vllm_config: Any, needed: Callable[[], bool]) -> bool:
    """Patch this worker before it captures graphs: while `needed()` is true, no step gets a whole graph.

    Returns False if that is not possible, so that no step at all gets one; the log says why.
    """
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_mode:
        return True
    if problem := _in_the_way(vllm_config):
        if compilation.cudagraph_mode.has_full_cudagraphs():
            pieces = compilation.is_attention_compiled_piecewise()
            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.NONE
        graphs = "piecewise CUDA graphs" if compilation.cudagraph_mode else "no CUDA graphs"
        logger.warning("%s for all steps: %s", graphs, problem)
        return False
    if compilation.cudagraph_mode.has_full_cudagraphs():
        _patch_dispatcher(needed)
    return True


def _in_the_way(vllm_config: Any) -> str:
    # Without the variable, the configuration has asked for pieces already, whichever runner it is now.
    if vllm_config.use_v2_model_runner or envs.VLLM_USE_V2_MODEL_RUNNER is not False:
        return V2_RUNNER
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    if any(name.startswith("FLASHINFER") for name in backends):
        return FLASHINFER
    difference = next(differences(GRAPHS), "")
    return f"{difference} in this vLLM" if difference else ""


def _patch_dispatcher(needed: Callable[[], bool]) -> None:
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    dispatching = inspect.unwrap(CudagraphDispatcher.dispatch)  # an earlier connector of this process is gone

    @functools.wraps(dispatching)
    def dispatch(
        self: CudagraphDispatcher, *args: Any, invalid_modes: Set[Any] | None = None, **named: Any
    ) -> Any:
        if needed():
            invalid_modes = {CUDAGraphMode.FULL, *(invalid_modes or ())}
        return dispatching(self, *args, invalid_modes=invalid_modes, **named)

    CudagraphDispatcher.dispatch = dispatch


def take_back_whole_graph(before: int) -> bool:
    """Run the next forward pass without graphs if vLLM chose a whole graph anyway.

    Returns whether vLLM did. `before` is how often vLLM had done so earlier, for the log. A step without a
    forward context counts, too, but runs unchanged: it cannot be aborted, and exports are sent after it.
    """
    if is_forward_context_available():
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return False
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    if (before + 1).bit_count() == 1:  # 1, 2, 4, ...: it may happen with every such step
        logger.error(
            "vLLM chose a whole CUDA graph for a step with work between its layers, which now runs without "
            "graphs times=%d: set cudagraph_mode to PIECEWISE",
            before + 1,
        )
    return True
