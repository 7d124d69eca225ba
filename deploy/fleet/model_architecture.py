"""Reads a model's architecture from its config.json, if its files are on this machine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.fleet.schema import SMALL_MODEL
from deploy.models import hub, smollm2

STATES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm")
STATE_KEYS = ("mamba_d_state", "ssm_state_size", "ssm_cfg", "linear_num_key_heads", "mamba_expand")
# Rotary embeddings with which max_position_embeddings is the longest context. With others vLLM multiplies it.
YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
LONG_ROPE = ("default", "mrope", "llama3", "longrope", "su", *YARN)
# The first is Command R's, and vLLM prefers it to the others.
POSITIONS = ("model_max_length", "max_position_embeddings", "n_positions", "max_seq_len")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Architecture of a model. None or 0 means that its config.json does not say."""

    names: tuple[str, ...]  # names of vLLM's classes for the model
    layers: int
    attention_layers: int  # layers that keep keys and values
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    latent_dim: int  # multi-head latent attention: what a token leaves in each layer, on every rank
    states: bool  # some layers keep a state instead of keys and values
    layer_kinds: int  # kinds of layers (with windows, without, with states): each has a group of KV
    layer_hooks: bool  # vLLM calls connectors between its layers
    multimodal: bool
    dtype: str
    weight_bytes: int  # bytes of the weights' files

    def kv_bytes(self, tokens: int, tensor: int, width: int) -> int:
        """Return the bytes of KV on one of `tensor` GPUs, with `width` bytes per number."""
        if self.latent_dim:
            return tokens * self.attention_layers * self.latent_dim * width
        heads = max(1, self.kv_heads // tensor)
        return 2 * tokens * self.attention_layers * heads * self.head_dim * width


def find_architecture(model: str) -> Architecture | None:
    """Return the architecture of `model`: `smollm2`, a directory, or in the cache. None if it is not here."""
    if model == smollm2.NAME:
        return replace(
            architecture_of(smollm2.CONFIG, smollm2.WEIGHT_BYTES), max_context=smollm2.LONGEST_CONTEXT
        )
    directory = None if model == SMALL_MODEL else model_directory(model)
    if directory is None:
        return None
    try:
        content = json.loads((directory / "config.json").read_text())
        return architecture_of(content, _weight_bytes(directory))
    except (OSError, ValueError, TypeError, AttributeError):  # damaged, or values of other types
        return None


def architecture_of(content: Mapping[str, Any], weight_bytes: int = 0) -> Architecture:
    text = next((content[key] for key in ("text_config", "llm_config") if key in content), content)

    def number(*keys: str) -> int:
        return next((int(text[key]) for key in keys if isinstance(text.get(key), int)), 0)

    heads = number("num_attention_heads", "n_head", "n_heads")
    hidden = number("hidden_size", "n_embd", "d_model")
    kinds = set(text.get("layer_types") or ())
    layers = number("num_hidden_layers", "n_layer", "n_layers")
    states = bool(kinds.intersection(STATES)) or any(text.get(key) for key in STATE_KEYS)
    return Architecture(
        names=tuple(map(str, content.get("architectures") or ())),
        layers=layers,
        attention_layers=_attention_layers(text, layers) if states else layers,
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_kv_heads") or heads,
        head_dim=number("head_dim") or (hidden // heads if heads else 0),
        max_context=_max_context(text, number(*POSITIONS)),
        latent_dim=number("kv_lora_rank") and number("kv_lora_rank") + number("qk_rope_head_dim"),
        states=states,
        layer_kinds=len(kinds),
        layer_hooks=text.get("model_type") != "deepseek_v32" and "index_topk" not in text,
        multimodal=any(key in content for key in ("vision_config", "audio_config")),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or content.get("torch_dtype") or ""),
        weight_bytes=weight_bytes,
    )


def _attention_layers(text: Mapping[str, Any], layers: int) -> int:
    """Return the number of attention layers in a model whose other layers keep a state."""
    if types := text.get("layer_types"):
        return sum(1 for one in types if one not in STATES)
    every = text.get("full_attention_interval") or text.get("attn_layer_period")
    return layers // every if every else len(text.get("attn_layer_indices") or ())


def _max_context(text: Mapping[str, Any], positions: int) -> int:
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor") or 1
    if kind in LONG_ROPE or not isinstance(factor, int | float):
        return positions
    return int(factor * positions)


def model_directory(model: str) -> Path | None:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    cached = hub.cache() / f"models--{model.replace('/', '--')}"
    try:
        return cached / "snapshots" / (cached / "refs" / "main").read_text().strip()
    except OSError:
        return None


def _weight_bytes(directory: Path) -> int:
    """Return the size of the weights, which their index states even if they have not been downloaded."""
    try:
        return int(
            json.loads((directory / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        files = list(directory.glob("consolidated*.safetensors")) or directory.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)
