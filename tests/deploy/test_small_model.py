"""The small model has the same bytes on every machine, and its text tokenizes to the generated tokens."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deploy.errors import DeployError
from deploy.small_model import (
    BIAS,
    BIAS_CHANNEL,
    SPEAKABLE,
    VOCABULARY_SIZE,
    ModelShape,
    make_model,
    make_weights,
)

SMALL = ModelShape(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "small"
    assert make_model(directory, SMALL)
    return directory


def digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_the_small_model_of_one_shape_always_has_the_same_bytes(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "again", SMALL)
    assert digest(tmp_path / "again") == digest(model)


def test_make_model_keeps_a_model_of_the_same_shape_and_replaces_another(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    assert make_model(directory, SMALL)
    assert not make_model(directory, SMALL)
    assert make_model(directory, replace(SMALL, layers=1))
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 1


def test_make_model_refuses_a_directory_with_other_content(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(DeployError, match="something else"):
        make_model(tmp_path, SMALL)
    assert (tmp_path / "precious.txt").exists()


def test_the_tokenizer_decodes_the_tokens_of_any_text_to_that_text(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in ("plain", "naïve 東京 🙂\n\t\x00", '{"a": [1, 2]}', " leading  spaces "):
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_text_that_the_small_model_generates_tokenizes_to_the_generated_tokens(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    said = [token for token in SPEAKABLE if token < 256]
    assert tokenizer.encode(tokenizer.decode(said)).ids == said


def test_the_small_model_never_generates_excluded_tokens() -> None:
    weights = make_weights(SMALL)
    generator = np.random.default_rng(1)
    hidden = generator.normal(0, 30, (500, SMALL.hidden)).astype(np.float32)
    hidden[:, BIAS_CHANNEL] = BIAS  # what every embedding wrote; no layer touches it
    normed = hidden / np.sqrt((hidden**2).mean(1, keepdims=True)) * weights["model.norm.weight"]
    logits = normed @ weights["lm_head.weight"].T
    mute = np.setdiff1d(np.arange(VOCABULARY_SIZE), SPEAKABLE)
    assert (logits[:, mute].max(1) < logits[:, list(SPEAKABLE)].max(1) - 20).all()
    writers = [name for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(writers) == 2 * SMALL.layers
    assert all(not weights[name][BIAS_CHANNEL].any() for name in writers)
