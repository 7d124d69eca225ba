"""Sizes of the engine steps: large on a GPU; small on a CPU, where they only test that the steps run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.small_model import ModelShape


@dataclass(frozen=True)
class EngineSizes:
    model: ModelShape
    vocabulary: int
    prompts: tuple[int, ...]  # tokens of the prompts whose first token is timed
    batches: tuple[int, ...]  # numbers of simultaneous answers
    prompt: int  # prompt tokens of each of these answers, and of a turn beside offline work
    decoded: int  # tokens of each answer
    offline: tuple[int, int]  # number of offline prompts, and their tokens
    turns: int  # turns beside offline work
    host_kv_gib: float
    paper: tuple[int, int, float, float]  # prompt tokens, answer tokens, requests a second, seconds
    arguments: Mapping[str, Any] = field(default_factory=dict)  # for vLLM


LARGE = EngineSizes(
    ModelShape(  # Qwen3 8B's
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, max_context=40_960
    ),
    vocabulary=151_936,
    prompts=(2048, 8192, 32_768),
    batches=(1, 16, 64),
    prompt=512,
    decoded=256,
    offline=(48, 6000),
    turns=24,
    host_kv_gib=16.0,
    paper=(4096, 256, 2.0, 15.0),
    arguments={
        "dtype": "bfloat16",
        "max_model_len": 36_864,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
    },
)
SMALL = EngineSizes(
    ModelShape(),
    vocabulary=640,
    prompts=(512,),
    batches=(1, 4),
    prompt=64,
    decoded=24,
    offline=(3, 300),
    turns=3,
    host_kv_gib=0.2,
    paper=(64, 8, 2.0, 2.0),
    arguments={
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 28,
        "block_size": 32,
        "enforce_eager": True,
    },
)
