"""First latency model of an engine: measured on an equal engine, or guessed from its accelerator."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from placement.scheduling.latency_model import LatencyModel
from placement.scheduling.latency_prior import ModelSize, prior
from placement.sizing.accelerators import accelerator_of
from workers.engine.coserving.config import CoServingConfig
from workers.profiles import ProfileKey

logger = logging.getLogger("conserve.workers.starting_model")


def hardware_name() -> str:
    """Return the accelerator's name, or the processor's name with its thread count."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name} x{os.environ.get('OMP_NUM_THREADS') or os.cpu_count()}"


def key_of(vllm_config: Any, power_cap_w: float | None) -> ProfileKey:
    """Return the key of this engine's profile."""
    import vllm

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return ProfileKey(
        model=Path(model.model).name,
        dtype=str(model.dtype).removeprefix("torch."),
        hardware=hardware_name(),
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        power_cap_w=power_cap_w,
        graphs=_graphs(vllm_config),
        vllm=vllm.__version__,
    )


def _graphs(vllm_config: Any) -> str:
    if vllm_config.model_config.enforce_eager:
        return "eager"
    # The mode of iterations with prompts. Whether iterations without prompts run as whole graphs is decided
    # in the worker, which may be in another process.
    mode = vllm_config.compilation_config.cudagraph_mode
    return f"graphs {mode.mixed_mode().name.lower()}" if mode else "compiled"


def starting_model(config: CoServingConfig, key: ProfileKey, guess: LatencyModel | None) -> LatencyModel:
    """Return the measured model, or else `guess`, or else the configured model, by default a slow one.

    With a slow model an engine admits little offline work until it has measured its own iterations.
    """
    if config.profiled:
        return config.model
    if (found := config.profiles.get(str(key))) is not None:
        logger.info("latency profile found key=%r", str(key))
        measured = LatencyModel(**found)
        # Profiles are measured without armed iterations, so the guess adds their cost.
        return measured if guess is None or measured.armed else replace(measured, armed=guess.armed)
    logger.warning(
        "no latency profile key=%r measured=%d: starting from %s; run `conserve profile`",
        str(key),
        len(config.profiles),
        "a conservative model" if guess is None else "a guess for this accelerator",
    )
    return guess or config.model


def guess_of(vllm_config: Any, device: str) -> LatencyModel | None:
    """Guess a latency model from the accelerator and the served model's size, None if either is unknown."""
    board = accelerator_of(device)
    try:
        size = _size(vllm_config)
    except (AttributeError, TypeError, ValueError):
        return None
    return prior(board, size, vllm_config.parallel_config.tensor_parallel_size) if board else None


def _size(vllm_config: Any) -> ModelSize:
    model, text = vllm_config.model_config, vllm_config.model_config.hf_text_config
    layers, hidden, head = text.num_hidden_layers, text.hidden_size, model.get_head_size()
    heads = text.num_attention_heads
    kv_heads, sides = (1, 1) if model.use_mla else (model.get_total_num_kv_heads(), 2)
    experts = int(model.get_num_experts())
    width = (getattr(text, "moe_intermediate_size", None) if experts else None) or text.intermediate_size
    mixing = hidden * head * (2 * heads + 2 * kv_heads)
    output = hidden * text.vocab_size
    used = max(1, int(model.get_num_experts_per_tok())) if experts else 1
    bytes_each = model.dtype.itemsize
    return ModelSize(
        parameters=layers * (mixing + 3 * hidden * width * max(1, experts)) + output,
        active=layers * (mixing + 3 * hidden * width * used) + output,
        bytes_each=bytes_each,
        attention=layers * heads * head,
        kv_bytes=layers * kv_heads * head * sides * bytes_each,
    )
