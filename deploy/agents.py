"""Configuration for coding agents that talk to a fleet, isolated from the user's own configuration.

Each agent gets a directory for its settings and sessions, and environment variables that point to the fleet.
HOME is left unchanged, so that the agent's tools, such as git and compilers, find the user's settings.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_OUTPUT_TOKENS = 8_192  # of an answer; agents ask for up to 32,000, which a small context does not hold


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """Address, key and limits with which a client uses one model of a fleet."""

    url: str  # without `/v1`
    model: str
    key: str
    context: int  # tokens
    certificate: str = ""  # file of the gateway's certificate, if the system does not trust it

    @property
    def trust(self) -> dict[str, str]:
        """Return the environment variable that makes programs on Node.js trust the gateway's certificate."""
        return {"NODE_EXTRA_CA_CERTS": self.certificate} if self.certificate else {}

    @property
    def output_tokens(self) -> int:
        return min(MAX_OUTPUT_TOKENS, self.context // 4)


@dataclass(frozen=True, slots=True)
class Setup:
    """Files and environment variables for an agent, and the user's variables that it must not see."""

    environment: Mapping[str, str]
    files: Mapping[Path, str] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    def write(self) -> None:
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def applied(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return a copy of `environment` with this setup's variables and without those in `removed`."""
        kept = {name: value for name, value in environment.items() if name not in self.removed}
        return {**kept, **self.environment}


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its program, its npm package, its first prompt's size, and the maker of its setup."""

    program: str
    package: str
    first_prompt: int  # its tokens without the user's text, by SmolLM2's tokenizer
    setup: Callable[[Path, AgentEndpoint], Setup]


def _codex(directory: Path, fleet: AgentEndpoint) -> Setup:
    settings = f"""model = {json.dumps(fleet.model)}
model_provider = "conserve"
model_context_window = {fleet.context}
check_for_update_on_startup = false

[model_providers.conserve]
name = "ConServe"
base_url = {json.dumps(fleet.url + "/v1")}
wire_api = "responses"
env_key = "CONSERVE_API_KEY"

[analytics]
enabled = false
"""
    environment = {"CODEX_HOME": str(directory), "CONSERVE_API_KEY": fleet.key}
    if fleet.certificate:  # SSL_CERT_FILE would replace the authorities of the agent's tools, too
        environment["CODEX_CA_CERTIFICATE"] = fleet.certificate
    return Setup(environment, {directory / "config.toml": settings})


def _claude(directory: Path, fleet: AgentEndpoint) -> Setup:
    sizes = ("", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_", "SMALL_FAST_")
    models = [f"ANTHROPIC_{size}MODEL" for size in sizes]
    environment = {
        "CLAUDE_CONFIG_DIR": str(directory),
        "ANTHROPIC_BASE_URL": fleet.url,
        "ANTHROPIC_AUTH_TOKEN": fleet.key,
        **dict.fromkeys(models, fleet.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(fleet.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(fleet.output_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **fleet.trust,
    }
    own = {"ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN"}
    clouds = {f"CLAUDE_CODE_USE_{cloud}" for cloud in ("BEDROCK", "FOUNDRY", "VERTEX")}  # ignore the address
    return Setup(environment, removed=frozenset(own | clouds))


def _opencode(directory: Path, fleet: AgentEndpoint) -> Setup:
    model = {"name": fleet.model, "limit": {"context": fleet.context, "output": fleet.output_tokens}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ConServe",
        "options": {"baseURL": f"{fleet.url}/v1", "apiKey": "{env:CONSERVE_API_KEY}"},
        "models": {fleet.model: model},
    }
    name = f"conserve/{fleet.model}"
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"conserve": provider},
        **dict.fromkeys(("model", "small_model"), name),
        # Its requests carry the session's id, and their prompt has nothing in common with the session's.
        "agent": {"title": {"disable": True}},
        "autoupdate": False,
        "share": "disabled",
    }
    file = directory / "opencode.json"
    kinds = ("CONFIG", "DATA", "STATE", "CACHE")
    folders = {f"XDG_{kind}_HOME": str(directory / kind.lower()) for kind in kinds}
    environment = {
        "OPENCODE_CONFIG": str(file),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "CONSERVE_API_KEY": fleet.key,
        **folders,
        **fleet.trust,
    }
    return Setup(environment, {file: json.dumps(settings, indent=2) + "\n"})


def _qwen(directory: Path, fleet: AgentEndpoint) -> Setup:
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": fleet.model},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
    }
    environment = {
        "QWEN_HOME": str(directory),
        "OPENAI_BASE_URL": f"{fleet.url}/v1",
        "OPENAI_API_KEY": fleet.key,
        "OPENAI_MODEL": fleet.model,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(fleet.output_tokens),
        **fleet.trust,
    }
    return Setup(environment, {directory / "settings.json": json.dumps(settings, indent=2) + "\n"})


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("codex", "@openai/codex", 9_300, _codex),
    "claude": Agent("claude", "@anthropic-ai/claude-code", 12_600, _claude),
    "opencode": Agent("opencode", "opencode-ai", 7_800, _opencode),
    "qwen": Agent("qwen", "@qwen-code/qwen-code", 19_100, _qwen),
}
