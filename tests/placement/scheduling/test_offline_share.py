"""A configured offline share is served, even under online load that would leave no time."""

from placement.scheduling.interface import ServingSettings
from placement.scheduling.policy_registry import make_policy
from tests.placement.scheduling.views import MODEL, arrived, fill, offline, online, policy_with, view

CROWD = tuple(arrived(f"new{i}", 1000) for i in range(8))


def test_many_online_requests_take_the_whole_iteration_without_an_offline_share() -> None:
    assert fill(make_policy(ServingSettings()), view(offline("off"), waiting=CROWD))["off"] == 0


def test_the_offline_share_is_kept_beside_many_online_requests() -> None:
    tokens = fill(make_policy(ServingSettings(offline_share=0.1)), view(offline("off"), waiting=CROWD))
    assert tokens["off"] == 204
    assert sum(tokens.values()) == 2048


def test_only_an_offline_request_that_waited_long_gets_a_token_beside_many_online_requests() -> None:
    policy = make_policy(ServingSettings(ageing_s=5.0))
    aged = offline("aged", 300, 200, last_served=4.0)
    fresh = offline("fresh", 300, 200, last_served=9.0)
    tokens = fill(policy, view(aged, fresh, waiting=CROWD))
    assert tokens["aged"] == 1
    assert tokens["fresh"] == 0


def test_an_offline_request_that_waited_for_long_is_the_last_to_be_preempted() -> None:
    policy = make_policy(ServingSettings(ageing_s=5.0))
    aged = offline("aged", 900, 800, last_served=1.0, arrival=2.0)
    fresh = offline("fresh", 900, 800, arrival=1.0)
    state = view(online("on"), aged, fresh, waiting=(arrived("new", 300),), free=0)
    assert policy.plan(state, MODEL).preempt == ("fresh",)


def test_an_offline_request_that_waited_for_long_may_start_with_little_free_memory() -> None:
    waiting = offline("head", running=False, arrival=1.0, last_served=0.0)
    state = view(online("on"), free=5, offline_head=waiting, offline_waiting=1)
    assert fill(policy_with({"online_reserve": 0.5}), state)["head"] == 0
    aged = fill(policy_with({"online_reserve": 0.5}, ageing_s=5.0), state)
    assert aged["head"] > 0
