"""Logs have one line per event with conversation and request ids, and no text of prompts or answers."""

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from router.process import OneLine
from tests.support.fake_fleet import ask, assistant, fleet, user
from tests.support.log_lines import LINE, fields

CANARY = "canary-7f3a"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Yield a text that receives the lines of all loggers during a test, in our processes' log format."""
    written, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(written), root.level
    handler.setFormatter(OneLine())
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield written
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def test_a_log_line_with_a_traceback_or_line_breaks_stays_one_line(lines: io.StringIO) -> None:
    log = logging.getLogger("conserve.test")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("failed path=%r", "/a\nFAKE")
    log.warning("client chose %s", "\r\n2026-01-01T00:00:00.000Z INFO forged \u2028\x1b[31m")
    first, second = lines.getvalue().splitlines()
    assert LINE.match(first) and LINE.match(second)
    assert "ValueError" in first and "test_logs.py" in first
    assert "\x1b" not in second


async def test_a_turn_is_logged_in_one_line_with_its_conversation_and_request_ids(
    tmp_path: Path, lines: io.StringIO
) -> None:
    async with fleet(tmp_path) as made:
        answer = await ask(made.urls[0], [user("hello")], stream=True)
    (turn,) = [line for line in lines.getvalue().splitlines() if " turn conversation=" in line]
    match = LINE.match(turn)
    assert match and match["logger"] == "conserve.router.turn"
    said = fields(match["event"])
    assert said["conversation"].endswith(answer.conversation)
    assert said["request"].encode() in answer.body
    assert said["outcome"] == "complete" and int(said["output"]) > 0
    placed = [line for line in lines.getvalue().splitlines() if " placed conversation=" in line]
    assert [fields(line)["conversation"] for line in placed] == [said["conversation"]]


async def test_no_part_of_a_prompt_is_ever_logged(tmp_path: Path, lines: io.StringIO) -> None:
    async with fleet(tmp_path, prefillers=1) as made:
        url = made.urls[0]
        messages = [user(CANARY * 20)]
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            prompt = messages if path.endswith("chat/completions") else CANARY
            assert (await ask(url, prompt, path=path, stream=True)).status == 200
        messages += [assistant(CANARY), user(CANARY)]
        assert (await ask(url, messages, user=CANARY, metadata={"note": CANARY})).status == 200
        assert (await ask(url, [user(CANARY * 10_000)])).status >= 400  # too large for any engine
        async with aiohttp.ClientSession() as session:
            for raw in (CANARY, f'{{"messages": "{CANARY}'):
                kind = {"content-type": "application/json"}
                async with session.post(f"{url}/v1/chat/completions", data=raw, headers=kind) as response:
                    assert response.status == 400
        for names, status in ((("p0",), 200), (("d0", "d1"), 503)):
            for name in names:
                engine = made.engines[name]
                engine.fail_status, engine.fail_body = 500, f'{{"error": "{CANARY}"}}'
            asked = await ask(url, [user(f"{CANARY} {names}")], max_tokens=50)
            assert (asked.status == 200) is (status == 200)
        await made.settle()
    said = lines.getvalue()
    assert "prefill failed" in said and said.count(" turn conversation=") >= 4
    assert CANARY not in said
    assert all(LINE.match(line) for line in said.splitlines()), said


def test_a_gateway_process_logs_one_line_per_event() -> None:
    code = "from router.process import log_to_stderr as on; import logging; on(); logging.info('a\\nb key=1')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    (line,) = done.stderr.splitlines()
    assert LINE.match(line)
