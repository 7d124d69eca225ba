"""The programs of examples/ run unchanged against a fleet."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.test_frameworks import PYTHON, has
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# For each example: a package that may be missing, and a pattern of its output.
PROGRAMS = {
    "openai_sdk": ("openai", r"decoder=\S+"),
    "anthropic_sdk": ("anthropic", r"> And of Italy\?"),
    "openai_agents": ("agents", r"\S"),
    "langgraph_agent": ("langchain_openai", r"\S"),
    "tool_wait_hints": ("openai", r"[1-9]\d* of \d+ prompt tokens were not computed again"),
    "batch": ("openai", r"completed .*completed=4"),
}


def test_every_example_program_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_program_prints_the_expected_output(laptop_fleet: RunningFleet, name: str) -> None:
    package, printed = PROGRAMS[name]
    if not has(package):
        pytest.skip(f"{package} is not installed here; `make clients` has it")
    ran = subprocess.run(
        [PYTHON, str(EXAMPLES / f"{name}.py")],
        env={
            **os.environ,
            "CONSERVE_URL": laptop_fleet.url,
            "CONSERVE_API_KEY": "example",
            "TOOL_SECONDS": "2",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(printed, ran.stdout), ran.stdout


def test_all_turns_of_the_openai_sdk_example_run_on_one_decoder(laptop_fleet: RunningFleet) -> None:
    ran = subprocess.run(
        [PYTHON, str(EXAMPLES / "openai_sdk.py")],
        env={**os.environ, "CONSERVE_URL": laptop_fleet.url, "CONSERVE_API_KEY": "example-one-decoder"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    turns = re.findall(r"\[(c-\S+): .*?decoder=([\w-]+)", ran.stdout)
    assert len(turns) == 3 and len(set(turns)) == 1, ran.stdout
