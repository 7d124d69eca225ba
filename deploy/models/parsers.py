"""Chooses vLLM's parsers of tool calls and of reasoning from a model's own files.

A wrong parser is worse than none, so each rule names its models, or the words of their chat templates.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IN_JSON = r"""<tool_call>(\\n|\s)*\{\\?["'](name|arguments)"""


@dataclass(frozen=True, slots=True)
class ModelText:
    """Properties of a model that determine the form of its answers."""

    kind: str  # model_type of its config.json
    template: str  # the model's chat template; empty: none


def text_in(directory: Path) -> ModelText | None:
    """Return the properties of the model in `directory`; None without a config.json."""
    config = _json(directory / "config.json")
    if not config:
        return None
    try:
        template = (directory / "chat_template.jinja").read_text()
    except OSError:
        written = _json(directory / "tokenizer_config.json").get("chat_template") or ""
        if not isinstance(written, str):  # several, by name
            written = "\n".join(str(one.get("template")) for one in written)
        template = written
    return ModelText(str(config.get("model_type") or ""), template)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True)
class Rule:
    parser: str  # the parser's name in vLLM
    kinds: str = ".*"  # a regular expression for model_type
    marks: tuple[str, ...] = ()  # regular expressions, all of which the chat template has

    def fits(self, model: ModelText) -> bool:
        found = all(re.search(mark, model.template) for mark in self.marks)
        return found and re.fullmatch(self.kinds, model.kind) is not None


# The first rule that fits a model decides.
TOOL_RULES = (
    Rule("openai", "gpt_oss"),
    Rule("deepseek_v32", "deepseek_v32"),
    Rule("qwen3_coder", "qwen3.*|nemotron.*", ("<function=", "<parameter=")),
    Rule("step3p5", "step3p5", ("<function=",)),
    Rule("glm47", "glm4.*", ("<arg_key>",)),
    Rule("minimax_m2", "minimax.*", ("<minimax:tool_call>",)),
    Rule("seed_oss", "seed_oss", ("<seed:tool_call>",)),
    Rule("kimi_k2", "kimi_k2|deepseek_v3", (r"<\|tool_calls_section_begin\|>",)),
    Rule("deepseek_v3", "deepseek_v3|qwen2|qwen3|llama", ("<｜tool▁calls▁begin｜>", "```json")),
    Rule("deepseek_v31", "deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    Rule("mistral", ".*mi[sx]tral.*", (r"\[TOOL_CALLS\]",)),
    Rule("llama4_pythonic", "llama4.*", (r"<\|python_start\|>",)),
    Rule("llama3_json", "llama|mllama", ("Environment: ipython",)),
    Rule("granite4", "granitemoehybrid", ("<tool_call>",)),
    Rule("granite", "granite.*", (r"<\|tool_call\|>",)),
    Rule("phi4_mini_json", "phi3", (r"<\|tool\|>",)),
    Rule("functiongemma", "gemma3.*", ("<start_function_call>",)),
    Rule("hermes", marks=(IN_JSON,)),
)
REASONING_RULES = (
    Rule("openai_gptoss", "gpt_oss"),
    Rule("qwen3", "qwen3.*", ("<think>",)),
    Rule("glm47", "glm4.*", ("<think>",)),
    Rule("minimax_m2", "minimax.*", ("<think>",)),
    Rule("seed_oss", "seed_oss", ("<seed:think>",)),
    Rule("nemotron_v3", "nemotron.*", ("<think>",)),
    Rule("kimi_k2", "kimi_k2|deepseek_v3", (r"<\|tool_calls_section_begin\|>", "<think>")),
    Rule("deepseek_v3", "deepseek_v3", ("thinking", "</think>")),
    Rule("deepseek_r1", "deepseek_v3|qwen2|llama", ("<think>",)),
    Rule("mistral", ".*mi[sx]tral.*", (r"\[THINK\]",)),
    Rule("olmo3", "olmo3", ("<think>",)),
)
KINDS = {"tool-call-parser": ("tools", TOOL_RULES), "reasoning-parser": ("think", REASONING_RULES)}


@dataclass(frozen=True, slots=True)
class Choice:
    option: str  # vLLM's
    parser: str  # empty: none
    why: str  # empty: the model's files are not here

    def __str__(self) -> str:
        if not self.why:
            return f"{self.option}: not known yet: chosen when the model is fetched"
        return f"{self.option}: {self.parser or 'none'} ({self.why})"


def choose(model: ModelText | None) -> tuple[Choice, ...]:
    """Return the parsers of tool calls and of reasoning. `model` is None if its files are not here."""
    return tuple(_choice(option, model, word, rules) for option, (word, rules) in KINDS.items())


def _choice(option: str, model: ModelText | None, word: str, rules: tuple[Rule, ...]) -> Choice:
    if model is None:
        return Choice(option, "", "")
    by_hand = f"set {option} in engine.args where it needs one"
    rule = next((rule for rule in rules if rule.fits(model)), None)
    if rule is not None:
        marks = (
            ", ".join(mark.replace("\\", "") for mark in rule.marks if mark != IN_JSON)
            or "tool calls in JSON"
        )
        template = f", and its chat template has {marks}" if rule.marks else ""
        return Choice(option, rule.parser, f"model_type is {model.kind}{template}")
    if word not in model.template:
        return Choice(option, "", f"its chat template does not mention '{word}'")
    return Choice(option, "", f"no rule fits model_type {model.kind} and its chat template: {by_hand}")
