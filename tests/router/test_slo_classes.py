"""SLO classes: the choice of a turn's class, its targets for engines, and the order of waiting turns."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from router.errors import BadRequest
from router.gateway.config import GatewayConfig, ServedModel, SloClass, SloSettings
from router.gateway.slo_classes import SloClasses
from router.gateway.turn.turn import FLOW_HEADERS
from router.identity.conversation_ids import namespace
from tests.support.fake_fleet import ask, fleet, get, user
from tests.support.waiting import until

GOLD = SloClass("gold", SloSettings(ttfet_s=60.0, last_turn_tbt_s=0.05, queue_weight=30.0))
PAID = SloClass("paid", SloSettings(queue_weight=5.0, owners=(namespace("alice"),)))
SLOS = {one.name: one.settings for one in (GOLD, PAID)}
CONFIG = GatewayConfig("none:1", (ServedModel("small"),), slos=SLOS, tbt_s=0.05)
engine_arguments = SloClasses(CONFIG).engine_arguments


def chosen(
    headers: dict[str, str] | None = None, body: dict[str, Any] | None = None, key: str = "bob"
) -> str:
    return SloClasses(CONFIG).choose(namespace(key), headers or {}, body or {}).name


def test_a_turns_class_is_chosen_by_header_body_field_llm_d_objective_or_owner() -> None:
    assert chosen() == "default"
    assert chosen(key="alice") == "paid"
    assert chosen({"x-slo-class": "gold"}, key="alice") == "gold"
    assert chosen(body={"slo_class": "gold"}) == "gold"
    assert chosen({"x-llm-d-inference-objective": "gold"}) == "gold"
    assert chosen({"x-gateway-inference-objective": "gold"}) == "gold"
    assert chosen({"x-llm-d-inference-objective": "of another fleet"}) == "default"
    assert chosen({"x-llm-d-inference-objective": "paid"}) == "default"  # reserved for other keys


@pytest.mark.parametrize("body", [{"slo_class": "none"}, {"slo_class": ["gold"]}, {"slo_class": "paid"}])
def test_a_turn_that_asks_for_an_unknown_or_reserved_class_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="class"):
        chosen(body=body)


def test_engines_get_the_targets_and_the_queue_weight_of_a_turns_class() -> None:
    default = SloClass("default", SloSettings(last_turn_tbt_s=0.5))  # for answers to users, not for engines
    assert engine_arguments(default, {}, {"vllm_xargs": {"slo_tbt_ms": 90}}) == {}
    assert engine_arguments(GOLD, {}, {}) == {"vllm_xargs": {"slo_tbt_ms": 50.0, "queue_weight": 30.0}}
    own = engine_arguments(GOLD, {}, {"vllm_xargs": {"slo_tbt_ms": 90}})
    assert own["vllm_xargs"]["slo_tbt_ms"] == 90
    llm_d = {"x-llm-d-slo-ttft-ms": "500", "x-llm-d-slo-tpot-ms": "70"}
    assert engine_arguments(default, llm_d, {}) == {"vllm_xargs": {"slo_ttft_ms": 500.0, "slo_tbt_ms": 70.0}}
    with pytest.raises(BadRequest, match="x-llm-d-slo-ttft-ms"):
        engine_arguments(default, {"x-llm-d-slo-ttft-ms": "soon"}, {})


@pytest.mark.parametrize(
    ("headers", "body"),
    [({}, {"vllm_xargs": {"slo_tbt_ms": 1}}), ({"x-slo-tpot-ms": "1"}, {})],
    ids=["in the body", "as llm-d says it"],
)
def test_a_turn_cannot_ask_for_a_tighter_tbt_than_its_class_has(
    headers: dict[str, str], body: dict[str, Any]
) -> None:
    """A tighter TBT target would slow down all turns of the engine."""
    tight = SloClass("tight", SloSettings(last_turn_tbt_s=0.02))
    for of, least in ((SloClass("default", SloSettings()), 50), (PAID, 50), (GOLD, 50), (tight, 20)):
        said = engine_arguments(of, headers, body)
        assert said["vllm_xargs"]["slo_tbt_ms"] == least


@pytest.mark.parametrize(
    ("headers", "body"),
    [({}, {"vllm_xargs": {"slo_ttft_ms": 0.001}}), ({"x-slo-ttft-ms": "0.001"}, {})],
    ids=["in the body", "as llm-d says it"],
)
def test_a_turn_cannot_ask_for_a_tighter_ttft_than_its_class_or_the_engines_have(
    headers: dict[str, str], body: dict[str, Any]
) -> None:
    """A tighter TTFT target would abort offline work."""
    config = replace(CONFIG, ttft_s=2.0)
    default = SloClass("default", SloSettings(ttfet_s=0.1))  # for answers to users, not for engines
    tight = SloClass("tight", SloSettings(ttfet_s=0.5))
    for of, least in ((default, 2000), (PAID, 2000), (GOLD, 2000), (tight, 500)):
        before = raised(of)
        said = SloClasses(config).engine_arguments(of, headers, body)
        assert said["vllm_xargs"]["slo_ttft_ms"] == least
        assert raised(of) == before + 1
    later = SloClasses(config).engine_arguments(GOLD, {"x-slo-ttft-ms": "2500"}, {})
    assert later["vllm_xargs"]["slo_ttft_ms"] == 2500


def raised(of: SloClass) -> float:
    return REGISTRY.get_sample_value("conserve_slo_targets_raised_total", {"slo_class": of.name}) or 0.0


@pytest.mark.parametrize("header", FLOW_HEADERS)
async def test_a_waiting_turn_of_another_flow_goes_before_later_turns_of_the_first_flow(
    tmp_path: Path, header: str
) -> None:
    """Flows are served alternately, whichever of llm-d's headers names a turn's flow."""
    engine = {"kv_tokens": 12_000, "token_s": 0.02}
    async with fleet(tmp_path, decoders=1, engine=engine, place_wait_s=20.0) as made:
        full = await ask(made.urls[0], [user("x" * 10_000)], max_tokens=2)
        done: list[str] = []

        async def one(name: str, flow: str) -> None:
            said = {"x-session-id": name, header: flow}
            answer = await ask(made.urls[0], [user("y" * 9_000)], headers=said, max_tokens=2)
            assert answer.status == 200
            done.append(name)
            await get(f"{made.urls[0]}/v1/conversations/{name}", "DELETE")

        waiting = []
        for number, flow in enumerate(("a", "a", "a", "b")):
            waiting.append(asyncio.create_task(one(f"{flow}{number}", flow)))
            await until(lambda: made.directory.table.waiting == len(waiting))
        await get(f"{made.urls[0]}/v1/conversations/{full.conversation}", "DELETE")
        await asyncio.gather(*waiting)
        assert done.index("b3") < done.index("a2")


async def test_a_turn_of_a_higher_class_is_placed_before_turns_that_wait_longer(tmp_path: Path) -> None:
    """With one full decoder, the turn of the higher class is served first, even if it arrived last."""
    engine = {"kv_tokens": 4000, "token_s": 0.02}
    async with fleet(
        tmp_path, decoders=1, engine=engine, slos={"gold": GOLD.settings}, place_wait_s=20.0
    ) as made:
        full = await ask(made.urls[0], [user("x" * 3000)], max_tokens=2)
        done: list[str] = []

        async def one(name: str, **headers: str) -> None:
            said = {"x-session-id": name, **headers}
            answer = await ask(made.urls[0], [user("y" * 1500)], headers=said, max_tokens=2, stream=True)
            assert answer.status == 200
            done.append(name)
            await get(f"{made.urls[0]}/v1/conversations/{name}", "DELETE")

        waiting = []
        for number, said in enumerate(({}, {}, {"x-slo-class": "gold"})):
            waiting.append(asyncio.create_task(one(f"c{number}", **said)))
            await until(lambda: made.directory.table.waiting == len(waiting))
        await get(f"{made.urls[0]}/v1/conversations/{full.conversation}", "DELETE")
        await asyncio.gather(*waiting)
        assert done[0] == "c2"
        gold = next(seen for seen in made.decoder_requests() if seen.conversation.endswith(":c2"))
        assert gold.body["vllm_xargs"] == {"slo_tbt_ms": 50.0, "queue_weight": 30.0}
        assert "vllm_xargs" not in made.decoder_requests()[-1].body
        _, page = await get(f"{made.urls[0]}/metrics")
        assert 'conserve_slo_total{met="yes",objective="ttfet",slo_class="gold"} 1.0' in page
        assert 'conserve_class_ttfet_seconds_count{slo_class="gold"} 1.0' in page


async def test_a_client_cannot_set_the_queue_weight_of_its_turn(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        answer = await ask(made.urls[0], [user("hi")], vllm_xargs={"queue_weight": 1000})
        assert answer.status == 400
        answer = await ask(made.urls[0], [user("hi")], vllm_xargs={"priority_s": -1000})
        assert answer.status == 400
