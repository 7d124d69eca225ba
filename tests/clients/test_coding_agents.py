"""Real, unmodified coding agents work in a repository without a terminal, with the model of a fleet.

`make clients` installs them and names their directory in CONSERVE_AGENT_PROGRAMS. With
CONSERVE_RECORD_REQUESTS=1 their requests become the fixtures of `test_recorded_requests.py`.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.recorded import record
from tests.fleet.talk import get
from tests.support.agent_fleet import agent_fleet
from tests.support.fleet import RunningFleet, environment
from tests.support.recording_proxy import RecordedExchange, recording_proxy

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

PROGRAMS = os.environ.get("CONSERVE_AGENT_PROGRAMS", "")
LIMIT_S = 240
SECRET = "marmalade"  # content of a file that the agent has to read
BIG = "A line of a file whose tokens Claude Code has counted.\n" * 800
ANSWER = "I have read the file and counted its characters."
COUNT = "wc -c < notes.txt > size.txt"
TURN = re.compile(r" turn conversation=\S+:(\S+) .* prompt=(\d+) cached=(\d+) output=(\d+) recomputed=(\d+) ")


def shell(tool: str, field: str, **others: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": {field: COUNT, **others}}


@dataclass(frozen=True)
class Scripted:
    """Script of one agent's run: its arguments, and the tool calls and texts that the model replies."""

    agent: str
    arguments: tuple[str, ...]
    replies: tuple[dict[str, Any] | str, ...]

    def prompt(self, repository: Path) -> str:
        replies = [one if isinstance(one, str) else json.dumps(one) for one in (*self.replies, ANSWER)]
        script = "\n".join(f"REPLY: {reply}" for reply in replies).replace("HERE", str(repository))
        return f"Read notes.txt and count its characters.\n{script}\n"


CODEX = ("exec", "--dangerously-bypass-approvals-and-sandbox")
CLAUDE = ("--print", "--allowedTools", "Read,Bash,WebSearch")
CAT = {"name": "exec_command", "arguments": {"cmd": "cat notes.txt"}}
SCRIPTS = {
    "codex": Scripted("codex", (*CODEX, "-"), (CAT, shell("exec_command", "cmd"))),
    "claude": Scripted(
        "claude",
        CLAUDE,
        (
            {"name": "Read", "arguments": {"file_path": "HERE/notes.txt"}},
            shell("Bash", "command", description="Count"),
        ),
    ),
    "opencode": Scripted(
        "opencode",
        ("run",),
        (
            {"name": "read", "arguments": {"filePath": "HERE/notes.txt"}},
            shell("bash", "command", description="Count"),
        ),
    ),
    "qwen": Scripted(
        "qwen",
        ("--yolo",),
        (
            {"name": "read_file", "arguments": {"file_path": "HERE/notes.txt"}},
            shell("run_shell_command", "command", description="Count", is_background=False),
        ),
    ),
}
# Kinds of requests that agents send only at times, each with a text that only it contains.
OCCASIONAL = {
    "codex-compaction": (
        Scripted("codex", (*CODEX, "-c", "model_auto_compact_token_limit=9000", "-"), (CAT, "The summary.")),
        "CONTEXT CHECKPOINT COMPACTION",
    ),
    "claude-web-search": (
        Scripted(
            "claude",
            CLAUDE,
            (
                {"name": "ToolSearch", "arguments": {"query": "select:WebSearch"}},
                *[{"name": "WebSearch", "arguments": {"query": SECRET}}] * 2,
            ),
        ),
        "web_search_20250305",
    ),
    "claude-count-tokens": (
        Scripted("claude", CLAUDE, ({"name": "Read", "arguments": {"file_path": "HERE/big.txt"}},)),
        "/v1/messages/count_tokens",
    ),
}


@pytest.fixture(scope="module")
def programs() -> str:
    if not PROGRAMS:
        pytest.skip("the coding agents are not installed here; `make clients` installs them from npm")
    return PROGRAMS


@pytest.fixture(scope="module")
def fleet(programs: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with agent_fleet(tmp_path_factory.mktemp("agents") / "model") as running:
        yield running


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "notes.txt").write_text(f"The word is {SECRET}.\n")
    (folder / "big.txt").write_text(BIG)
    author = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "notes")):
        subprocess.run(["git", *command], cwd=folder, check=True, timeout=60)
    return folder


async def run_agent(
    script: Scripted, url: str, programs: str, repository: Path, key: str
) -> tuple[int, str, str]:
    """Run an agent by `conserve run`; return its exit status, its standard output and its standard error.

    The agent can reach no server but the fleet's gateway, because its proxy is a closed port.
    """
    home = repository.parent / "home"
    home.mkdir()
    variables = environment(repository.parent / "state") | {
        "PATH": os.pathsep.join((programs, os.environ["PATH"])),
        "HOME": str(home),
        "PWD": str(repository),  # OpenCode prefers it to its working directory
        "CONSERVE_API_KEY": key,
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.cli", "run", script.agent, "--url", url),
        *("--", *script.arguments),
        cwd=repository,
        env=variables,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate(script.prompt(repository).encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def worked(
    name: str, script: Scripted, fleet: RunningFleet, programs: str, repository: Path
) -> list[RecordedExchange]:
    """Run an agent until it has answered; check that its requests were served, and return its POSTs."""
    async with recording_proxy(fleet.url) as proxy:
        status, answer, said = await run_agent(script, proxy.url, programs, repository, key=name)
    posts = [one for one in proxy.exchanges if one.method == "POST"]
    shown = "\n".join(f"{one.status} {one.target} {one.answer[-300:]!r}" for one in posts)
    assert (status, ANSWER in answer) == (0, True), f"{answer}\n{said}\n{shown}"
    assert {one.status for one in proxy.exchanges} == {200}, shown
    if os.environ.get("CONSERVE_RECORD_REQUESTS"):
        record(name, proxy.exchanges, {str(repository): "/repository", str(repository.parent): "/home"})
    return posts


@pytest.mark.parametrize("name", SCRIPTS)
async def test_an_agent_completes_its_task_in_one_conversation_that_recomputes_nothing(
    fleet: RunningFleet, programs: str, repository: Path, name: str
) -> None:
    turns = await worked(name, SCRIPTS[name], fleet, programs, repository)
    assert SECRET.encode() in turns[-1].body
    assert (repository / "size.txt").read_text().strip() == str(len(f"The word is {SECRET}.\n"))
    assert len(turns) >= 3
    (conversation,) = {one.answer_headers["x-conversation-id"] for one in turns}
    assert_computed_once(fleet, conversation, len(turns))
    found = get(fleet.url, f"/v1/conversations/{conversation}", name)
    assert (found["turns"], found["transfers"]) == (len(turns), 1)


@pytest.mark.parametrize("name", OCCASIONAL)
async def test_the_gateway_serves_the_kinds_of_requests_that_an_agent_sends_only_occasionally(
    fleet: RunningFleet, programs: str, repository: Path, name: str
) -> None:
    script, mark = OCCASIONAL[name]
    requests = await worked(name, script, fleet, programs, repository)
    assert any(mark in one.target or mark.encode() in one.body for one in requests)


def assert_computed_once(fleet: RunningFleet, conversation_id: str, turns: int) -> None:
    """Check in the gateway's log that each later turn found the former prompt cached, except one block."""
    block = fleet.fleet.engine.args["block-size"]

    def lines() -> list[tuple[int, ...]]:
        text = "".join(file.read_text() for file in fleet.home.gateways.glob("*/log"))
        return [tuple(map(int, line[1:])) for line in TURN.findall(text) if line[0] == conversation_id]

    fleet.until(lambda: len(lines()) == turns, 20, "the turns' lines in the log")
    first, *later = lines()
    print("prompt, cached, output, recomputed:", first, *later)
    before = first[0]
    for prompt, cached, _, recomputed in later:
        assert recomputed == 0 and cached >= before // block * block, lines()
        before = prompt
