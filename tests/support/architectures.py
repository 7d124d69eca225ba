"""Small random models of the architectures in docs/models.md, made when needed with transformers.

Weights are normally distributed float32 numbers. With smaller weights, or with vLLM's dummy weights, answers
repeat a few tokens, which hides wrong KV.
"""

import fcntl
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.small_model import PADDING, START_OF_TURN, VOCABULARY_SIZE, token_id, write_tokenizer

CONTEXT = 8192
WINDOW = 64  # tokens
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": token_id(START_OF_TURN),
    "eos_token_id": token_id(PADDING),
    "pad_token_id": token_id(PADDING),
    "hidden_size": 128,
    "num_attention_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 6,
        "intermediate_size": 256,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": {
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "kv_lora_rank": 512,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "qwen3": {
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "llama": {
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}


@dataclass(frozen=True)
class ServedArchitecture:
    """One architecture of the table in docs/models.md."""

    kind: str
    groups: int  # KV cache groups
    arguments: dict[str, Any] = field(default_factory=dict)


SERVED = {
    "qwen3": ServedArchitecture("qwen3", 1),
    "llama": ServedArchitecture("llama", 1),
    "gemma3": ServedArchitecture("gemma3_text", 3),
    "gpt-oss": ServedArchitecture("gpt_oss", 2),
    "qwen3-next": ServedArchitecture(
        "qwen3_next", 4, {"dtype": "bfloat16"}
    ),  # its CPU kernels support only these options
}
STD = 0.15


def architecture_directory(kind: str) -> Path:
    """Return the directory of the model of this kind; make the model if it is missing."""
    base = Path(tempfile.gettempdir()) / "conserve-test-architectures"
    base.mkdir(exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory = base / kind
        if not (directory / "chat_template.jinja").exists():
            _make(directory, kind)
    return directory


def _make(directory: Path, kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **SHAPES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, STD)
            elif name.endswith(
                "A_log"
            ):  # otherwise a state forgets within a few tokens, and wrong states go unnoticed
                parameter.fill_(-8)
    model.save_pretrained(directory)
    write_tokenizer(directory, CONTEXT)
