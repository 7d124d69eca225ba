"""The laptop fleet runs on a Ray cluster with a node for each tier; one node is lost and replaced."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.streams import ChatStream
from tests.fleet.talk import client, conversation, opening, text_turn
from tests.support.fleet import RunningFleet, fleet_up
from tests.support.nodes import Nodes

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

RECOVERY_S = 400
HOSTS = {"prefill-node": "127.0.0.3", "decode-node-a": "127.0.0.4", "decode-node-b": "127.0.0.5"}

RESOURCES = {name: {"decode_tier" if "decode" in name else "prefill_tier": 1.0} for name in HOSTS}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        made.start_head({"control_node": 10})
        made.join(HOSTS, RESOURCES)
        yield made
    finally:
        made.close()


@pytest.fixture
def fleet(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningFleet]:
    for name, value in nodes.environment.items():
        monkeypatch.setenv(name, value)

    def edit(content: Any) -> None:
        content["name"] = "nodes"
        content["engine"]["lease"] = "15s"
        content["ray"] = {"address": nodes.address, "control_resources": {"control_node": 1}}

    with fleet_up("random", edit) as fleet:
        yield fleet


def test_engines_run_on_their_tiers_nodes_and_streams_of_a_lost_node_continue_elsewhere(
    fleet: RunningFleet, nodes: Nodes
) -> None:
    hosts = {name: one["http"].split(":")[0] for name, one in fleet.engines().items()}
    assert hosts["prefill-0"] == HOSTS["prefill-node"]
    assert {hosts["decode-0"], hosts["decode-1"]} == {HOSTS["decode-node-a"], HOSTS["decode-node-b"]}

    on: dict[str, tuple[str, list]] = {}  # decoder: a conversation there
    number = 0
    while len(on) < 2:
        number += 1
        assert number < 20, f"all on {list(on)}"
        messages = opening(700 + number, 60)
        text_turn(client(fleet.url, f"c{number}"), fleet.model, messages)
        on.setdefault(conversation(fleet, f"c{number}", 1)["decoder"], (f"c{number}", messages))
    lost = conversation(fleet, on["decode-1"][0])["decoder"]
    (victim, messages), (bystander, others) = on["decode-1"], on["decode-0"]
    messages.append({"role": "user", "content": "Go on at length."})
    others.append({"role": "user", "content": "Go on at length."})
    stream = ChatStream(fleet.url, fleet.model, messages, victim, 600)
    other = ChatStream(fleet.url, fleet.model, others, bystander, 100)
    stream.until_text(10)
    node = next(name for name, host in HOSTS.items() if host == hosts[lost])
    nodes.lose(node)
    for one in (stream, other):  # the victim's goes on on the decoder that is left
        one.end(120)
        assert one.finished and one.error is None and one.broken is None
    again = conversation(fleet, victim, 2)
    assert (again["decoder"], again["placements"][-1]["cause"]) == ("decode-0", "rebound")

    nodes.join({"decode-node-c": "127.0.0.6"}, {"decode-node-c": {"decode_tier": 1.0}})
    fleet.until(
        lambda: (
            fleet.engines()[lost]["http"].startswith("127.0.0.6:")
            and fleet.engines()[lost]["phase"] == "serving"
        ),
        RECOVERY_S,
        "the engine to return on the node that joined",
    )
    messages.append({"role": "user", "content": "And on."})
    text_turn(client(fleet.url, victim), fleet.model, messages)
    assert conversation(fleet, victim, 3)["decoder"] == "decode-0", "bound for life"
    fresh = opening(799, 60)
    text_turn(client(fleet.url, "fresh"), fleet.model, fresh)
    assert conversation(fleet, "fresh", 1)["decoder"] == lost, "the empty one has the least KV in use"
