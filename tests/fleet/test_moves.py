"""Conversations leave a draining decoder with their KV: nothing is computed again, and no stream is cut."""

import os
import signal

import pytest

from benchmarks.kv.drain import drain_one
from tests.fleet.talk import client, conversation, opening, text_turn
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]


def test_conversations_move_off_a_drained_decoder_without_a_recomputed_token(
    laptop_fleet: RunningFleet,
) -> None:
    found = drain_one(laptop_fleet.home, "decode-0", conversations=10)
    assert found["moved_conversations"] >= 2, found
    # Moved KV is not held for its lease of a minute. Conversations of other tests move too, which takes time.
    assert found["drain_seconds_after_last_move"] < 30, found
    lost = {name: found[name] for name in ("moved_recomputed_tokens", "cut_streams", "moved_other_outputs")}
    assert set(lost.values()) == {0}, found


def test_idle_conversations_move_with_their_kv_off_an_engine_that_gets_sigterm(
    laptop_fleet: RunningFleet,
) -> None:
    fleet, talked = laptop_fleet, {}
    for number in range(4):
        key, messages = f"idle-{number}", opening(700 + number, 60)
        talked[key] = messages, text_turn(client(fleet.url, key), fleet.model, messages).prompt_tokens
    homes = {key: conversation(fleet, key, 1)["decoder"] for key in talked}
    engine = homes["idle-0"]
    before = fleet.engines()[engine]
    os.kill(before["pid"], signal.SIGTERM)
    fleet.until(lambda: conversation(fleet, "idle-0")["decoder"] != engine, 60, "the conversation to leave")
    for key, (messages, held) in talked.items():
        if homes[key] != engine:
            continue
        told = conversation(fleet, key)
        assert (told["placements"][-1]["cause"], told["turns"]) == ("moved", 1)
        messages.append({"role": "user", "content": "Go on."})
        again = text_turn(client(fleet.url, key), fleet.model, messages)
        assert again.cached_tokens >= held // 32 * 32
        assert conversation(fleet, key, 2)["decoder"] == told["decoder"]
    fleet.until(lambda: fleet.engines()[engine]["epoch"] > before["epoch"], 400, "the engine to start again")
    fleet.until(lambda: fleet.engines()[engine]["phase"] == "serving", 400, "the engine to serve again")
