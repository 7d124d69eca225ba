"""Parsers are chosen by a model's own files; an unknown model gets none."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from deploy.fleet import vllm_options
from deploy.models.parsers import REASONING_RULES, TOOL_RULES, ModelText, choose

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


def test_an_unknown_family_gets_a_sentence_that_says_what_to_do() -> None:
    absent, unknown = choose(None)[0], choose(ModelText("bailing_moe", GLM))[0]
    assert str(absent).startswith(
        "tool-call-parser: none (the model's config.json is not on this machine: set"
    )
    assert str(unknown).startswith("tool-call-parser: none (no rule fits model_type bailing_moe")


class Hub(BaseHTTPRequestHandler):
    """Stands in for the Hugging Face Hub: describes models and serves their files."""

    files: ClassVar[dict[str, bytes]] = {
        "config.json": json.dumps({"model_type": "qwen3", "num_hidden_layers": 2}).encode(),
        "chat_template.jinja": QWEN3.encode(),
    }

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/"):
            siblings = [{"rfilename": one} for one in self.files]
            siblings.append({"rfilename": "model.safetensors", "size": 1_000})
            body = json.dumps({"id": "a/b", "sha": "0" * 40, "siblings": siblings}).encode()
        else:
            body = self.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{name}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_files_of_a_model_of_the_hub_are_fetched_before_parsers_are_chosen(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = (
        "import deploy.fleet\nfrom deploy.models import hub, built_in\n"
        "assert [one.parser for one in built_in.parsers('a/b')] == ['', '']\n"
        "assert hub.describe('a/b') == 1000\n"
        "print([one.parser for one in built_in.parsers('a/b')])\n"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    env.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    server.shutdown()
    server.server_close()
    assert done.stdout.strip() == "['hermes', 'qwen3']", done.stderr
