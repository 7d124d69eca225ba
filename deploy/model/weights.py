"""Seeded random weights of a Qwen3 that cannot write what its tokenizer would read back differently."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from deploy.model.shape import ModelShape
from deploy.model.vocabulary import CLOSING, SPEAKABLE, VOCABULARY_SIZE

Weights = dict[str, NDArray[np.float32]]

# Qwen3 has no output bias. One channel of the residual stream stands in for it: every embedding writes a
# little there (much would drown what tells tokens apart), no layer writes to it, the last norm amplifies it,
# and the output rows of unspeakable tokens subtract it.
BIAS_CHANNEL = 0
BIAS = 0.05
BIAS_GAIN = 20_000.0
MUTE = -10.0
FAVOUR = 0.1  # about one standard deviation of a logit


def make_weights(shape: ModelShape) -> Weights:
    generator = np.random.default_rng(shape.seed)
    weights: Weights = {}
    for name, size in _matrices(shape):
        weights[name] = generator.normal(0.0, shape.std, size).astype(np.float32)
    for name, width in _norms(shape):
        weights[name] = np.ones(width, np.float32)
    _mute_unspeakable(weights)
    return weights


def _mute_unspeakable(weights: Weights) -> None:
    weights["model.embed_tokens.weight"][:, BIAS_CHANNEL] = BIAS
    weights["model.norm.weight"][BIAS_CHANNEL] = BIAS_GAIN
    for name, matrix in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            matrix[BIAS_CHANNEL, :] = 0.0
    output = weights["lm_head.weight"]
    output[:, BIAS_CHANNEL] = MUTE
    output[list(SPEAKABLE), BIAS_CHANNEL] = 0.0
    output[list(CLOSING), BIAS_CHANNEL] = FAVOUR


def _matrices(shape: ModelShape) -> Iterator[tuple[str, tuple[int, int]]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (VOCABULARY_SIZE, shape.hidden)
    for layer in range(shape.layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        yield attention + "q_proj.weight", (queries, shape.hidden)
        yield attention + "k_proj.weight", (keys, shape.hidden)
        yield attention + "v_proj.weight", (keys, shape.hidden)
        yield attention + "o_proj.weight", (shape.hidden, queries)
        yield mlp + "gate_proj.weight", (shape.intermediate, shape.hidden)
        yield mlp + "up_proj.weight", (shape.intermediate, shape.hidden)
        yield mlp + "down_proj.weight", (shape.hidden, shape.intermediate)
    yield "lm_head.weight", (VOCABULARY_SIZE, shape.hidden)


def _norms(shape: ModelShape) -> Iterator[tuple[str, int]]:
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_norm.weight", shape.head_dim
        yield prefix + "self_attn.k_norm.weight", shape.head_dim
        yield prefix + "input_layernorm.weight", shape.hidden
        yield prefix + "post_attention_layernorm.weight", shape.hidden
    yield "model.norm.weight", shape.hidden
