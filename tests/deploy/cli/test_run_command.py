"""`conserve run` starts a coding agent with its own settings, which point to a fleet."""

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.agents import AGENTS, AgentEndpoint
from router.auth.keys import inline_keys
from tests.support.fake_fleet import MODEL, FakeFleet, fleet
from tests.support.fleet import ROOT

PROGRAM = """#!/bin/sh
printf '%s\\n' "$@" > "$REPORT.arguments"
env -0 > "$REPORT.environment"
exit 7
"""


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    async with fleet(tmp_path, decoders=1, keys=inline_keys(("right",), ())) as running:
        yield running


async def conserve_run(tmp_path: Path, *arguments: str, key: str = "right") -> tuple[int, str]:
    """Run `conserve run` with a program that reports how it was started; return status and output."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "codex").write_text(PROGRAM)
    (programs / "codex").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:/bin:/usr/bin",
        "CONSERVE_HOME": str(tmp_path / "state"),
        "CONSERVE_API_KEY": key,
        "PYTHONPATH": str(ROOT),
        "REPORT": str(tmp_path / "report"),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.cli", "run", *arguments),
        env=environment,
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_conserve_run_gives_an_agent_its_settings_and_returns_its_exit_status(
    made: FakeFleet, tmp_path: Path
) -> None:
    given = ("exec", "--json", "do it")
    status, said = await conserve_run(tmp_path, "codex", "--url", made.urls[0], "--", *given)
    assert status == 7, said
    assert (tmp_path / "report.arguments").read_text().splitlines() == [*given]
    pairs = (tmp_path / "report.environment").read_text().split("\0")
    environment = dict(pair.partition("=")[::2] for pair in pairs if pair)
    settings = tomllib.loads((Path(environment["CODEX_HOME"]) / "config.toml").read_text())
    provider = settings["model_providers"][settings["model_provider"]]
    assert (settings["model"], provider["base_url"]) == (MODEL, f"{made.urls[0]}/v1")
    assert environment[provider["env_key"]] == "right"
    assert settings["model_context_window"] == next(iter(made.engines.values())).max_context
    assert f"CODEX_HOME={environment['CODEX_HOME']}" in said and "right" not in said


async def test_conserve_run_refuses_a_model_whose_context_is_too_short_for_the_agent(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, engine={"max_context": 13_000}) as made:
        status, said = await conserve_run(tmp_path, "codex", "--url", made.urls[0])
    assert status == 1, said
    assert "takes 13000 tokens, and the first prompt of codex alone has about 9300, beside which" in said


async def test_conserve_run_reports_a_missing_agent_or_fleet_in_a_sentence(
    made: FakeFleet, tmp_path: Path
) -> None:
    url = made.urls[0]
    for arguments, key, sentence in (
        (("qwen", "--url", url), "right", "npm install -g @qwen-code/qwen-code"),
        (("codex", "--url", url), "wrong", "set CONSERVE_API_KEY"),
        (("codex", "--url", url, "--model", "other"), "right", f"it serves {MODEL}"),
        (("codex", "--url", "http://127.0.0.1:9"), "right", "no gateway answers"),
    ):
        status, said = await conserve_run(tmp_path, *arguments, key=key)
        assert (status, sentence in said) == (1, True), said


@pytest.mark.parametrize("name", AGENTS)
def test_the_settings_of_every_agent_point_to_the_fleet_and_to_nothing_else(
    name: str, tmp_path: Path
) -> None:
    endpoint = AgentEndpoint("http://127.0.0.1:8000", 'm"odel', "secret", 40_000, "/c.pem")
    setup = AGENTS[name].setup(tmp_path, endpoint)
    setup.write()
    clouds = [f"CLAUDE_CODE_USE_{cloud}" for cloud in ("BEDROCK", "FOUNDRY", "VERTEX")]
    others = ("ANTHROPIC_API_KEY", *clouds)
    environment = setup.applied({"HOME": "/home/me", **dict.fromkeys(others, "mine")})
    assert environment["HOME"] == "/home/me"
    trust = "CODEX_CA_CERTIFICATE" if name == "codex" else "NODE_EXTRA_CA_CERTS"
    assert environment[trust] == "/c.pem" and "SSL_CERT_FILE" not in environment
    assert trust not in AGENTS[name].setup(tmp_path, replace(endpoint, certificate="")).environment
    assert "mine" not in environment.values() or name != "claude"
    texts = [*setup.environment.values(), *setup.files.values()]
    assert any("http://127.0.0.1:8000" in text for text in texts)
    assert any('m"odel' in text or json.dumps('m"odel') in text for text in texts)
    assert "secret" in setup.environment.values()
    assert not any("secret" in text for text in setup.files.values())
    assert all(path.is_relative_to(tmp_path) for path in setup.files)
    for path, text in setup.files.items():
        assert tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
