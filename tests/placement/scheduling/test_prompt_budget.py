"""Order and token budget of online prompts within an iteration."""

from dataclasses import replace

import pytest

from placement.priorities import ClassOrder
from placement.scheduling.interface import RequestView, ServingSettings, TurnTargets
from placement.scheduling.latency_model import BatchWork
from placement.scheduling.policy_registry import make_policy
from placement.scheduling.prompt_budget import prompts_in_order
from placement.scheduling.prompt_order import PromptSharing
from tests.placement.scheduling.views import MODEL, arrived, fill, offline, online, view

BOTH = pytest.mark.parametrize("name", ["conserve", "prompts_in_order"])


def given(name: str, *requests: RequestView, waiting: tuple[RequestView, ...] = ()) -> dict[str, int]:
    return fill(make_policy(ServingSettings(name)), view(*requests, waiting=waiting))


def started(key: str, left: int, computed: int = 1000, **more: object) -> RequestView:
    return online(key, computed + left, computed, last_token=None, arrival=10.0, **more)


@BOTH
def test_the_shortest_prompt_goes_first(name: str) -> None:
    tokens = given(
        name, started("long", 3000), online("a"), waiting=(arrived("longer", 9000), arrived("new", 50))
    )
    assert tokens["a"] == 1
    assert tokens["new"] == 50
    assert tokens["longer"] == 0


@BOTH
def test_a_long_prompt_overtakes_newer_short_ones_after_a_while(name: str) -> None:
    waiting = (arrived("new", 200), arrived("old", 3000, at=-20.0))
    tokens = given(name, online("a"), waiting=waiting)
    assert tokens["new"] == 0
    assert tokens["old"] > 0


@BOTH
def test_a_prompt_that_lacks_memory_does_not_delay_one_that_has_memory(name: str) -> None:
    refused = arrived("short", 50)
    tokens = given(name, started("long", 3000), waiting=(refused,))
    assert tokens["short"] == 50
    held = RequestView(**{f: getattr(refused, f) for f in refused.__slots__} | {"refused": True})
    tokens = given(name, started("long", 3000), online("a"), waiting=(held,))
    assert tokens["long"] > 50
    assert tokens["short"] == 0


@BOTH
def test_no_prompt_starts_before_an_overdue_prompt_that_lacks_memory(name: str) -> None:
    overdue = RequestView("big", False, arrival=-50.0, tokens=3000, computed=0, refused=True)
    plan = make_policy(ServingSettings(name)).plan(view(waiting=(arrived("new", 50), overdue)), MODEL)
    assert plan.waiting == ("big", "new")


def test_an_iteration_in_which_a_prompt_ends_has_no_part_of_the_next_prompt() -> None:
    behind = (arrived("next", 2500), arrived("third", 2600))
    tokens = given("prompts_in_order", started("ends", 50), offline("off"), waiting=behind)
    assert tokens == {"ends": 50, "off": 0, "next": 0, "third": 0}


def test_an_overdue_prompt_joins_the_iteration_in_which_another_prompt_ends() -> None:
    tokens = given("prompts_in_order", started("ends", 50), waiting=(arrived("next", 2500, at=-50.0),))
    assert tokens["next"] > 0


def test_online_prompts_fill_iterations_with_co_serving() -> None:
    tokens = given("conserve", started("ends", 50), waiting=(arrived("next", 2500),))
    assert tokens == {"ends": 50, "next": 2048 - 50}


def test_offline_requests_come_last_without_co_serving_and_go_on_decoding() -> None:
    running = offline("writes", 2000, 1999, last_token=9.9)
    tokens = given(
        "prompts_in_order", online("a"), running, offline("off", 9000), waiting=(arrived("new", 100),)
    )
    assert tokens["a"] == tokens["writes"] == 1
    assert tokens["new"] == 100
    assert tokens["off"] > 0
    work = BatchWork.of([(1, 99), (1, 1999), (100, 0), (tokens["off"], 0)])
    assert MODEL.seconds(work) <= 0.05


def test_requests_that_arrive_after_the_plan_share_the_remaining_time() -> None:
    plan = make_policy(ServingSettings("prompts_in_order")).plan(view(online("a")), MODEL)
    assert plan.builder.take(online("a"), 1) == 1
    assert 1 < plan.builder.take(arrived("late", 3000), 2000) < 2000
    assert plan.builder.take(arrived("later", 3000), 2000) == 1


def test_a_lower_class_goes_first_once_left_out_for_longer_than_the_weight_difference() -> None:
    first, gold = arrived("first", 2000, 10.0), replace(arrived("gold", 2000, 15.0), queue_weight=10.0)
    late = replace(gold, key="late", arrival=21.0)

    def order(classes: ClassOrder) -> list[str]:
        return [
            one.key
            for one in prompts_in_order((first, late, gold), 22.0, MODEL, PromptSharing(0.05), classes)
        ]

    served, classes = ClassOrder(), ClassOrder()
    assert order(classes) == ["first", "gold", "late"]  # nothing of its class was served for 10 s
    served.served(0.0, 21.5)
    assert order(served) == ["gold", "late", "first"]


def test_a_higher_class_stays_first_while_some_old_prompts_of_a_lower_class_are_served() -> None:
    """Old prompts have waited longer than the classes' `queue_weight`s differ, as in a lasting overload."""
    policy = make_policy(ServingSettings("prompts_in_order"))
    old = tuple(arrived(f"old-{n}", 1000, 10.0 - n) for n in range(20))
    turns = []
    for number in range(20):
        now = 20.0 + number / 10
        gold = replace(arrived(f"gold-{number}", 300, now), queue_weight=5.0)
        plan = policy.plan(view(waiting=(*old, gold), now=now), MODEL)
        assert plan.waiting is not None
        turns.append(plan.waiting.index(gold.key))
    assert turns[1:] == [0] * 19


@BOTH
def test_the_tightest_target_of_decoding_requests_bounds_the_prompts_of_all_classes(name: str) -> None:
    policy = make_policy(ServingSettings(name))
    prompt = replace(arrived("prompt", 3000, at=9.9), queue_weight=5.0)
    tight = online("tight", slo=TurnTargets(0.5, 0.02))
    tokens = fill(policy, view(online("a"), tight, waiting=(prompt,)))
    assert tokens["a"] == tokens["tight"] == 1
    assert tokens["prompt"] > 0
    assert MODEL.seconds(BatchWork.of([(1, 99), (1, 99), (tokens["prompt"], 0)])) <= 0.02


@BOTH
def test_decoding_requests_of_every_class_get_a_token(name: str) -> None:
    """Classes order waiting prompts, but take nothing from requests that decode."""
    higher = replace(online("higher"), queue_weight=5.0)
    lower = [online(f"lower-{number}", 40_001, 40_000) for number in range(20)]
    tokens = fill(make_policy(ServingSettings(name)), view(higher, *lower))
    assert set(tokens.values()) == {1}


@BOTH
def test_the_prompt_of_a_higher_class_is_computed_first(name: str) -> None:
    higher = replace(arrived("higher", 3000), queue_weight=5.0)
    tokens = given(name, online("a"), waiting=(arrived("lower", 50), higher))
    assert tokens["higher"] > 0
    assert tokens["lower"] == 0
