"""The tool loop of each unmodified agent framework is one conversation, even if the client sends no id.

Ordinary test runs include the SDKs of OpenAI and Anthropic. `make clients` includes all frameworks, in an
environment of their own, whose Python is named in CONSERVE_AGENTS_PYTHON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet.talk import get
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

AGENTS = Path(__file__).parent / "agents"
PYTHON = os.environ.get("CONSERVE_AGENTS_PYTHON", sys.executable)
IN_EVERY_RUN = ("openai", "anthropic")
# script, the package that it needs, the API key that it sends, which keeps conversations apart
FRAMEWORKS = [
    ("openai_sdk", "openai", "openai-sdk"),
    ("anthropic_sdk", "anthropic", "anthropic-sdk"),
    ("litellm_loop", "litellm", "litellm"),
    ("openai_agents_chat", "agents", "openai-agents"),
    ("openai_agents_responses", "agents", "openai-agents-responses"),
    ("langgraph_loop", "langgraph", "langgraph"),
    ("pydantic_ai_loop", "pydantic_ai", "pydantic-ai"),
    ("smolagents_loop", "smolagents", "smolagents"),
    ("mini_swe_agent_loop", "minisweagent", "mini-swe-agent"),
]


def has(package: str) -> bool:
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([PYTHON, "-c", found], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(("script", "package", "key"), FRAMEWORKS, ids=[name for name, _, _ in FRAMEWORKS])
def test_the_tool_loop_of_an_agent_framework_is_one_conversation(
    laptop_fleet: RunningFleet, script: str, package: str, key: str
) -> None:
    if package not in IN_EVERY_RUN and "CONSERVE_AGENTS_PYTHON" not in os.environ:
        pytest.skip(f"`make clients` runs {package}, whose import alone takes many seconds")
    fleet = laptop_fleet
    ran = subprocess.run(
        [PYTHON, str(AGENTS / f"{script}.py"), f"{fleet.url}/v1", fleet.model],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    requests = json.loads(ran.stdout.strip().splitlines()[-1])["requests"]
    assert requests > 1

    def turns() -> list[int]:
        return [one["turns"] for one in get(fleet.url, "/v1/conversations", key)["data"]]

    fleet.until(lambda: sum(turns()) >= requests, 20, "the last turn's end")
    assert turns() == [requests]
    (found,) = get(fleet.url, "/v1/conversations", key)["data"]
    assert found["transfers"] == 1
