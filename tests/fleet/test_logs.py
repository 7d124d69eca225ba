"""Gateway, directory and keepers write one line per event, and no process logs prompts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.ray.cluster import temporary_directory
from tests.fleet.talk import client, text_turn, tool_turn
from tests.support.fleet import RunningFleet
from tests.support.log_lines import LINE, fields

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

CANARY = "xylograph-canary-9041"
BEGINS = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ")


def logs(fleet: RunningFleet) -> Iterator[tuple[Path, str]]:
    for folder in (fleet.home.root, temporary_directory(fleet.home)):
        for path in folder.rglob("*"):
            if path.is_file() and (path.name == "log" or path.suffix in (".log", ".err", ".out")):
                yield path, path.read_text(errors="replace")


def test_log_lines_contain_ids_but_no_prompts_or_answers(laptop_fleet: RunningFleet) -> None:
    fleet = laptop_fleet
    sdk = client(fleet.url, "logs")
    messages = [{"role": "user", "content": f"{CANARY} " * 10}]
    tool_turn(sdk, fleet.model, messages)
    text_turn(sdk, fleet.model, messages)
    with sdk.with_streaming_response.chat.completions.create(
        model=fleet.model, messages=messages, max_tokens=4, stream=True
    ) as answer:
        conversation, text = answer.headers["x-conversation-id"], answer.read().decode()
    request = re.search(r'"id": ?"([^"]+)"', text)
    assert request

    gateway_log = fleet.home.gateways / "gateway-0" / "log"
    fleet.until(lambda: request[1] in gateway_log.read_text(), 30, "the turn's line")
    found = dict(logs(fleet))
    assert not [path for path, text in found.items() if CANARY in text]

    ours = [
        line
        for text in found.values()
        for line in text.splitlines()
        if BEGINS.match(line) or " conserve." in line
    ]
    assert all(LINE.match(line) for line in ours), [line for line in ours if not LINE.match(line)]
    loggers = {match["logger"] for line in ours if (match := LINE.match(line))}
    assert {
        "conserve.router.turn",
        "conserve.router.directory.directory",
        "conserve.workers.keeper",
    } <= loggers
    turns = [fields(line) for line in ours if " turn conversation=" in line and conversation in line]
    assert len(turns) == 3 and turns[-1]["request"] == request[1]
    assert [line for line in ours if " placed conversation=" in line and conversation in line]
    for line in gateway_log.read_text().splitlines():
        assert LINE.match(line), line
