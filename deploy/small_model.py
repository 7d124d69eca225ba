"""A small model made on the spot, so that real vLLM runs without a download."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deploy.models.directory import made_in

END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, START_OF_TURN, END_OF_TURN)
# Single tokens, as in Qwen's own vocabulary, but not special: the tool parser must see them.
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY_SIZE = 320  # a multiple of 64, as vLLM pads it otherwise


def token_id(text: str) -> int:
    return 256 + (*SPECIAL_TOKENS, *MARKERS).index(text)


SPEAKABLE: tuple[int, ...] = (*range(0x21, 0x7F), token_id(END_OF_TURN))
CLOSING: tuple[int, ...] = tuple(b'",]}')


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64  # vLLM's CPU attention supports 32, 64, 80, 96, 112, 128, 192, 256
    intermediate: int = 768
    max_context: int = 131_072  # as long as agents' prompts are
    seed: int = 0
    std: float = 0.15  # with less, answers become loops of two tokens, which would hide wrong KV
    merges: int = 0  # pairs of characters that are one token in tokenised text, and maybe two in an answer

    @property
    def vocabulary(self) -> int:
        return VOCABULARY_SIZE + -(-self.merges // 64) * 64

    @property
    def speakable(self) -> list[int]:
        return [*SPEAKABLE, *range(VOCABULARY_SIZE, VOCABULARY_SIZE + self.merges)]

    def hugging_face_config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": token_id(END_OF_TURN),
            "pad_token_id": token_id(PADDING),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": self.std,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": self.vocabulary,
        }


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
    for name, size in _sizes(shape):
        norm = len(size) == 1
        weights[name] = (
            np.ones(size, np.float32) if norm else (generator.normal(0.0, shape.std, size).astype(np.float32))
        )
    weights["model.embed_tokens.weight"][:, BIAS_CHANNEL] = BIAS
    weights["model.norm.weight"][BIAS_CHANNEL] = BIAS_GAIN
    for name, matrix in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            matrix[BIAS_CHANNEL, :] = 0.0
    output = weights["lm_head.weight"]
    output[:, BIAS_CHANNEL] = MUTE
    output[shape.speakable, BIAS_CHANNEL] = 0.0
    output[list(CLOSING), BIAS_CHANNEL] = FAVOUR
    return weights


def _sizes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and size of each weight; norms have one dimension."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        sizes = {
            "self_attn.q_proj": (queries, shape.hidden),
            "self_attn.k_proj": (keys, shape.hidden),
            "self_attn.v_proj": (keys, shape.hidden),
            "self_attn.o_proj": (shape.hidden, queries),
            "mlp.gate_proj": (shape.intermediate, shape.hidden),
            "mlp.up_proj": (shape.intermediate, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.intermediate),
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "input_layernorm": (shape.hidden,),
            "post_attention_layernorm": (shape.hidden,),
        }
        yield from ((f"model.layers.{layer}.{name}.weight", size) for name, size in sizes.items())
    yield "lm_head.weight", (shape.vocabulary, shape.hidden)
    yield "model.norm.weight", (shape.hidden,)


TEMPLATE = Path(__file__).parent / "small_model.jinja"


def write_tokenizer(directory: Path, max_context: int, merges: int = 0) -> None:
    vocabulary, pairs = _bytes_to_ids(), _pairs(merges)
    if pairs:  # added last, so that all other tokens keep their numbers
        others = (*SPECIAL_TOKENS, *MARKERS)
        vocabulary |= {text: token_id(text) for text in others}
        vocabulary |= {f"<unused {number}>": number for number in range(256 + len(others), VOCABULARY_SIZE)}
        vocabulary |= {"".join(pair): VOCABULARY_SIZE + number for number, pair in enumerate(pairs)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text())


def _pairs(count: int) -> list[tuple[str, str]]:
    """Return `count` pairs of printable characters in a fixed random order: the tokenizer's merges."""
    spoken = [chr(token) for token in SPEAKABLE if token < 256]
    every = [(one, other) for one in spoken for other in spoken]
    return [every[number] for number in np.random.default_rng(0).permutation(len(every))[:count]]


def _bytes_to_ids() -> dict[str, int]:
    """Return GPT-2's character for each byte: itself if it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return {stand_in[byte]: byte for byte in range(256)}


RECIPE_VERSION = 3  # raise it when a change makes other files from the same shape


def make_model(directory: Path, shape: ModelShape | None = None) -> bool:
    """Make the model unless `directory` already holds it; return whether it was written."""
    shape = shape or ModelShape()
    recipe = json.dumps({"version": RECIPE_VERSION, **asdict(shape)}, indent=2) + "\n"
    return made_in(directory, recipe, lambda draft: _write(draft, shape))


def _write(directory: Path, shape: ModelShape) -> None:
    save_file(make_weights(shape), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(shape.hugging_face_config(), indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": token_id(END_OF_TURN),
        "pad_token_id": token_id(PADDING),
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory, shape.max_context, shape.merges)
