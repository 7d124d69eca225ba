"""Loads the parts of an engine that drop layers, and lists the supported models. Imports no vLLM."""

from importlib import import_module
from typing import Any

from workers.processes import WorkerError

OVERLOAD_PLUGIN = "workers.engine.overload.plugin:OverloadPlugin"

# Models whose forward pass is an embedding, layers in order with a residual, and a norm;
# tests/workers/overload/test_split_models.py checks this in vLLM's code. The models are listed, because their
# form is not enough: vLLM may count the layers that a pass went through, for example to find experts.
SPLIT_MODELS = (
    *("GemmaForCausalLM", "LlamaForCausalLM", "Phi3ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
)


def layer_sharing(vllm_config: Any) -> Any | None:
    """Return the object with which a worker drops layers, or None without the overload plugin."""
    connector = vllm_config.kv_transfer_config
    extra = connector.kv_connector_extra_config if connector is not None else {}
    if OVERLOAD_PLUGIN not in extra.get("plugins", ()):
        return None
    return import_module("workers.engine.overload.layer_sharing").LayerSharing(vllm_config)


def split_scheduling(scheduler: Any, settings: Any) -> Any | None:
    """Return the object with which a scheduler drops layers, or None without the overload plugin."""
    side = scheduler.plugin("overload")
    if side is None:
        return None
    return import_module("workers.engine.overload.split_scheduling").SplitScheduling(
        scheduler, side, settings
    )


class OverloadConfigError(WorkerError, ValueError):
    """The engine cannot drop parameters. The message says why."""
