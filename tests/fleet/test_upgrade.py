"""`conserve up` changes a running fleet, and replicas follow the load, without disturbing conversations.

The tests use the fleet that all tests share. Their changes stay, because no other test depends on them.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAIError

from tests.fleet.streams import ChatStream
from tests.fleet.talk import client, conversation, opening, text_turn, tool_turn
from tests.support.fleet import RunningFleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

UPGRADE_S = 900
SEQUENCES = 31  # of decoders, instead of 32
Edit = Callable[[Any], object]


class Changing:
    """Fleet file of the running fleet, which the tests change step by step."""

    def __init__(self, fleet: RunningFleet, base: Path) -> None:
        self.fleet, self._file = fleet, base / "changed.yaml"
        self._content = yaml.safe_load(fleet.file.read_text())

    def up(self, edit: Edit = lambda content: None, *options: str) -> str:
        """Run `conserve up` with the changed file and return its output."""
        edit(self._content)
        self._file.write_text(yaml.safe_dump(self._content))
        answer = self.fleet.cli("up", str(self._file), *options, timeout_s=UPGRADE_S)
        assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
        return answer.stdout

    def epochs(self) -> dict[str, int]:
        return {name: one["epoch"] for name, one in self.fleet.engines().items()}


@pytest.fixture(scope="module")
def changing(laptop_fleet: RunningFleet, tmp_path_factory: pytest.TempPathFactory) -> Changing:
    return Changing(laptop_fleet, tmp_path_factory.mktemp("upgrade"))


def decode(**values: Any) -> Edit:
    return lambda content: content["tiers"][1].update(values)


def talk_until_one_is_on(fleet: RunningFleet, decoder: str) -> tuple[str, list[dict[str, Any]]]:
    """Start new conversations until one is placed on `decoder`; return its key and its messages.

    Each conversation goes to the decoder with the least KV, or to the first by name if none holds KV.
    """
    for number in range(6):
        key, messages = f"light-{number}", opening(960 + number, 40)
        text_turn(client(fleet.url, key), fleet.model, messages)
        told = conversation(fleet, key, 1)
        choice = told["placements"][0]["receipt"]["decoder"]
        others = [option["kv_in_use"] for option in choice["runners_up"]]
        assert choice["considered"] == 1 + len(others) + choice["without_capacity"] == 3
        assert all(choice["chosen"]["kv_in_use"] <= other for other in others), choice
        if told["decoder"] == decoder:
            return key, messages
    raise AssertionError(f"no new conversation is placed on {decoder}")


class TalkingAgents:
    """Agents that run turn after turn until they are stopped. A failed turn ends its agent."""

    def __init__(self, fleet: RunningFleet, count: int) -> None:
        self._fleet, self._stop = fleet, threading.Event()
        self.turns = dict.fromkeys((f"agent-{number}" for number in range(count)), 0)
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._talk, args=(key,)) for key in self.turns]

    def __enter__(self) -> "TalkingAgents":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=200)
            assert not thread.is_alive(), "a turn hangs"

    def all_have(self, turns: int) -> bool:
        return bool(self.failures) or min(self.turns.values()) >= turns

    def _talk(self, key: str) -> None:
        sdk, messages = client(self._fleet.url, key), opening(int(key[6:]) + 900, 40)
        while not self._stop.is_set():
            try:
                tool_turn(sdk, self._fleet.model, messages)
            except OpenAIError as error:
                self.failures.append(f"{key}, turn {self.turns[key]}: {error!r}")
                return
            self.turns[key] += 1
            self._stop.wait(0.5)


@pytest.fixture
def agents(laptop_fleet: RunningFleet) -> Iterator[TalkingAgents]:
    with TalkingAgents(laptop_fleet, 4) as talking:
        laptop_fleet.until(lambda: talking.all_have(1), 120, "the first turns")
        yield talking


def test_conserve_up_with_the_same_file_or_dry_run_changes_nothing(changing: Changing) -> None:
    before = changing.epochs()
    assert "is up as the file says" in changing.up()
    said = changing.up(decode(args={"max-num-seqs": SEQUENCES}), "--dry-run")
    assert f"tiers.decode.args.max-num-seqs: (not set) -> {SEQUENCES}" in said
    assert [line.strip() for line in said.splitlines() if line.startswith("  -")] == [
        "- drain decode-0 and start it again",
        "- drain decode-1 and start it again",
    ]
    assert changing.epochs() == before


def test_conversations_continue_while_gateways_and_decoders_are_replaced(
    changing: Changing, agents: TalkingAgents
) -> None:
    fleet = changing.fleet
    before, homes = changing.epochs(), {key: conversation(fleet, key)["decoder"] for key in agents.turns}
    gateways = set(fleet.processes("router.gateway.main"))
    changing.up(lambda content: content["conversation"].update(decoder_wait="31s"))
    turns = dict(agents.turns)
    fleet.until(lambda: agents.all_have(max(turns.values()) + 2), 120, "turns after the upgrade")
    assert agents.failures == []

    after = changing.epochs()
    assert after["prefill-0"] == before["prefill-0"]
    assert after["decode-0"] > before["decode-0"] and after["decode-1"] > before["decode-1"]
    assert not gateways & set(fleet.processes("router.gateway.main"))
    for key, home in homes.items():
        told = conversation(fleet, key)
        assert told["turns"] >= turns[key]
        assert told["placements"][0]["decoder"] == home, "it is the conversation from before"
        causes = {placement["cause"] for placement in told["placements"][1:]}
        assert causes and causes <= {"moved", "rebound"}, causes


def test_the_autoscaler_adds_and_removes_decoders_as_kv_in_use_rises_and_falls(changing: Changing) -> None:
    fleet = changing.fleet

    def follow(content: Any) -> None:
        decode(autoscale={"min": 2, "max": 3})(content)
        shares = {"high": 0.05, "target": 0.04, "low": 0.02}
        content["capacity"] = {**shares, "window": "2s", "cool_down": "5s", "calm": "5s", "drain": "60s"}

    def follow_no_more(content: Any) -> None:
        content["tiers"][1].pop("autoscale")
        content.pop("capacity")

    changing.up(follow)
    before = changing.epochs()
    heavy = [
        ChatStream(fleet.url, fleet.model, opening(950 + number, 500), f"heavy-{number}", 24_000)
        for number in range(4)
    ]
    fleet.until(lambda: fleet.engines().get("decode-2", {}).get("phase") == "serving", 400, "a third decoder")
    fleet.until(
        lambda: "decoders:   3 up" in fleet.cli("advise", fleet.fleet.name).stdout, 60, "advice on three"
    )

    light, messages = talk_until_one_is_on(fleet, "decode-2")
    for stream in heavy:
        assert stream.error is None and stream.broken is None
        stream.leave()
    fleet.until(lambda: "decode-2" not in fleet.engines(), 200, "the third decoder to go")
    fleet.until(lambda: not fleet.processes("workers.host", "decode-2"), 60, "its processes to end")

    messages.append({"role": "user", "content": "Go on."})
    text_turn(client(fleet.url, light), fleet.model, messages)
    assert conversation(fleet, light)["decoder"] in ("decode-0", "decode-1")
    assert changing.epochs() == before, "the others were left alone"
    changing.up(follow_no_more)
