"""An engine that shares its layers says what its batch takes, and cuts prompts that others would wait for."""

import pytest

from placement.overload.lookahead import Forecast, PipelineView
from placement.scheduling.interface import ServingSettings
from placement.scheduling.policy_registry import make_policy
from tests.placement.scheduling.views import MODEL, arrived, fill, offline, online, view

CALM = Forecast(0.006, 0.006)


def tokens_beside(*peers: Forecast, more: tuple[object, ...] = ()) -> dict[str, int]:
    waiting = (arrived("first", 300, at=-50.0), arrived("second", 1_000, at=-49.0))
    state = view(online("writes"), *more, waiting=waiting, pipeline=PipelineView(MODEL, peers))  # type: ignore[arg-type]
    return fill(make_policy(ServingSettings("prompts_in_order")), state)


def test_alone_it_takes_what_its_budget_lets_it() -> None:
    state = view(online("writes"), waiting=(arrived("first", 300), arrived("second", 1_000)))
    policy = make_policy(ServingSettings("prompts_in_order"))
    plan = policy.plan(state, MODEL)
    assert plan.forecast is None
    shared = policy.plan(
        view(*state.running, waiting=state.online_waiting, pipeline=PipelineView(MODEL, ())), MODEL
    )
    assert shared.forecast is not None and shared.builder.caps == plan.builder.caps


def test_beside_a_calm_peer_prompts_are_cut_from_behind() -> None:
    alone, beside = tokens_beside(), tokens_beside(CALM)
    assert alone["first"] == 300 and alone["second"] > 0
    assert 0 < beside["first"] < 300 and beside["second"] == 0 and beside["writes"] == 1
    assert sum(tokens_beside(CALM, CALM).values()) < sum(beside.values()) < sum(alone.values())


def test_beside_one_that_takes_as_long_nothing_is_cut() -> None:
    assert tokens_beside(Forecast(0.006, 1.0)) == tokens_beside()


def test_what_is_said_is_what_the_budget_lets_in_and_not_what_is_left_after_the_cut() -> None:
    policy = make_policy(ServingSettings("prompts_in_order"))
    waiting = (arrived("long", 2_000),)
    said = [
        policy.plan(
            view(online("writes"), waiting=waiting, pipeline=PipelineView(MODEL, peers)), MODEL
        ).forecast
        for peers in ((), (CALM,))
    ]
    assert said[0] == said[1] and said[0] is not None
    assert said[0].base_s == pytest.approx(MODEL.constant, rel=0.1) and said[0].wanted_s > 2 * said[0].base_s


def test_offline_work_does_not_fill_what_was_cut_off() -> None:
    beside = tokens_beside(CALM, CALM, more=(offline("batch", 3_000, 100),))
    assert beside["batch"] == 0
