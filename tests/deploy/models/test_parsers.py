"""vLLM's parsers are chosen by a model's own files; an unknown model gets no parser."""

import json
from pathlib import Path

import pytest

from deploy.fleet import vllm_options
from deploy.models.parsers import REASONING_RULES, TOOL_RULES, ModelText, choose
from tests.support.hub import standing_in

QWEN3 = """{{- '<tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n</tool_call>' }}{%- if tools %}
{{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}"""
QWEN2 = QWEN3.partition("\n")[0]
CODER = "{%- if tools %}<tool_call>\n<function=example_function_name>\n<parameter=example>"
GLM = "{% if tools %}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<think></think>"
LLAMA = '{{- "Environment: ipython\\n" }}{{- "<|python_tag|>" + tool_call.name }}{%- if tools %}'
R1 = "{% if tools %}'<｜tool▁calls▁begin｜>' + '\\n```json\\n' {{'<｜Assistant｜><think>\\n'}}"
V31 = "{% if not thinking is defined %}</think>'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'{% if tools %}"


@pytest.mark.parametrize(
    ("kind", "template", "tool", "reasoning"),
    [
        ("qwen3", QWEN3, "hermes", "qwen3"),
        ("qwen3_moe", QWEN3, "hermes", "qwen3"),
        ("qwen2", QWEN2, "hermes", ""),
        ("qwen3_moe", CODER, "qwen3_coder", ""),
        ("glm4_moe", GLM, "glm47", "glm47"),
        ("gpt_oss", "<|channel|>", "openai", "openai_gptoss"),
        ("llama", LLAMA, "llama3_json", ""),
        ("deepseek_v3", R1, "deepseek_v3", "deepseek_r1"),
        ("deepseek_v3", V31, "deepseek_v31", "deepseek_v3"),
        ("bailing_moe", GLM, "", ""),
        ("opt", "", "", ""),
    ],
)
def test_each_model_family_has_its_parsers(kind: str, template: str, tool: str, reasoning: str) -> None:
    assert [choice.parser for choice in choose(ModelText(kind, template))] == [tool, reasoning]


def test_every_parser_is_in_vllms_registry() -> None:
    for option, rules in (("tool-call-parser", TOOL_RULES), ("reasoning-parser", REASONING_RULES)):
        assert {rule.parser for rule in rules} <= set(vllm_options.options()[option])


def test_for_an_unknown_model_family_a_sentence_says_how_to_set_its_parsers() -> None:
    absent, unknown = choose(None)[0], choose(ModelText("bailing_moe", GLM))[0]
    assert str(absent) == "tool-call-parser: not known yet: chosen when the model is fetched"
    assert str(unknown).startswith("tool-call-parser: none (no rule fits model_type bailing_moe")


def test_files_of_a_model_of_the_hub_are_fetched_before_parsers_are_chosen(tmp_path: Path) -> None:
    files = {
        "config.json": json.dumps({"model_type": "qwen3", "num_hidden_layers": 2}).encode(),
        "chat_template.jinja": QWEN3.encode(),
        "model.safetensors": bytes(1_000),
    }
    program = (
        "import deploy.fleet\nfrom deploy.models import hub, built_in\n"
        "assert [one.parser for one in built_in.parsers('a/b')] == ['', '']\n"
        "assert hub.describe('a/b') == 1000\n"
        "print([one.parser for one in built_in.parsers('a/b')])\n"
    )
    with standing_in(files) as hub:
        done = hub.run(tmp_path, "-c", program)
    assert done.stdout.strip() == "['hermes', 'qwen3']", done.stderr
