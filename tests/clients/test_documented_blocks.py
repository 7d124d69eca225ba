"""Every code block in README.md and docs/quickstart.md runs, except lines listed here with a reason.

Blocks that call a fleet call the tests' fleet: its address and the name of its model are replaced.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.fleet import parse_fleet
from tests.support.fleet import ROOT, RunningFleet, environment

PAGES = ("README.md", "docs/quickstart.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS, MODEL = "http://127.0.0.1:8000", '"model": "smollm2"'
NOT_RUN = {  # reasons, by the beginning of a line
    "make up": "it calls `conserve up`, which starts the tests' fleet",
    "make test": "it would run this test again",
    "conserve up": "a fleet is up already; tests/deploy/test_up_and_down.py starts one",
    "conserve serve Qwen": "needs the Hugging Face Hub and GPUs; its parts: tests/deploy/cli/test_serve.py",
    "conserve run": "needs the agent's program; tests/deploy/cli/test_run_command.py starts a stand-in",
    "docker": "needs a container runtime",
    "pip install": "needs an index; tests/deploy/test_wheel.py installs the wheel without one",
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str

    @property
    def runnable(self) -> str:
        """Return the block's code without the lines in NOT_RUN."""
        return "\n".join(line for line in self.code.splitlines() if not line.startswith(tuple(NOT_RUN)))

    @property
    def asks_a_fleet(self) -> bool:
        return ADDRESS in self.code


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[1], match[2]))
    return found


def run(block: Block, home: Path, code: str) -> str:
    """Run the code of a block in an empty directory, and return what it prints."""
    program = [sys.executable, "-"] if block.language == "python" else ["bash", "-euo", "pipefail"]
    directory = home / f"block-{block.line}"
    directory.mkdir(parents=True)
    variables = environment(home)
    path = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    done = subprocess.run(
        program,
        input=code,
        cwd=directory,
        env={**variables, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


ALONE = [block for block in blocks() if not block.asks_a_fleet and block.runnable.strip()]
ASKING = [block for block in blocks() if block.asks_a_fleet]


def test_readme_and_quickstart_together_have_code_blocks_of_every_language() -> None:
    assert {block.page for block in ASKING} == set(PAGES)
    assert {block.language for block in blocks()} == {"", "yaml", "python"}


@pytest.mark.parametrize("block", ALONE, ids=name)
def test_a_documented_code_block_that_calls_no_fleet_runs(block: Block, tmp_path: Path) -> None:
    if block.language == "yaml":
        parse_fleet(block.code, name(block))
    else:
        run(block, tmp_path, block.runnable)


@pytest.mark.fleet
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", ASKING, ids=name)
def test_a_documented_code_block_that_calls_a_fleet_gets_an_answer(
    block: Block, laptop_fleet: RunningFleet, tmp_path: Path
) -> None:
    code = block.runnable.replace(ADDRESS, laptop_fleet.url)
    if block.language == "python":
        said = run(block, tmp_path, f"{code}\nprint(client.models.list().data)\n")
        assert laptop_fleet.model in said
        return
    assert MODEL in code
    said = run(block, tmp_path, code.replace(MODEL, f'"model": "{laptop_fleet.model}"'))
    assert '"choices"' in said, said
