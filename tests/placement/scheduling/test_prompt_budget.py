"""Prompts before their first token: which is computed first, beside what, and behind whom nobody waits."""

from dataclasses import replace

import pytest

from placement.priorities import ClassOrder
from placement.scheduling.interface import RequestView, ServingSettings, TurnTargets
from placement.scheduling.latency_model import BatchWork
from placement.scheduling.policy_registry import make_policy
from placement.scheduling.prompt_budget import in_turn
from placement.scheduling.prompt_order import PromptSharing
from tests.placement.scheduling.views import MODEL, SLO, arrived, fill, offline, online, view

BOTH = pytest.mark.parametrize("name", ["conserve", "prompts_in_order"])


def given(name: str, *requests: RequestView, waiting: tuple[RequestView, ...] = ()) -> dict[str, int]:
    return fill(make_policy(ServingSettings(name)), view(*requests, waiting=waiting))


def started(key: str, left: int, computed: int = 1000, **more: object) -> RequestView:
    return online(key, computed + left, computed, last_token=None, arrival=10.0, **more)


@BOTH
def test_the_shortest_goes_first_wherever_it_waits(name: str) -> None:
    tokens = given(
        name, started("long", 3000), online("a"), waiting=(arrived("longer", 9000), arrived("new", 50))
    )
    assert tokens["a"] == 1
    assert tokens["new"] == 50
    assert tokens["longer"] == 0


@BOTH
def test_a_long_one_ages(name: str) -> None:
    waiting = (arrived("new", 200), arrived("old", 3000, at=-20.0))
    tokens = given(name, online("a"), waiting=waiting)
    assert tokens["new"] == 0
    assert tokens["old"] > 0


@BOTH
def test_what_the_engine_had_no_place_for_makes_nobody_wait_who_has_one(name: str) -> None:
    refused = arrived("short", 50)
    tokens = given(name, started("long", 3000), waiting=(refused,))
    assert tokens["short"] == 50
    held = RequestView(**{f: getattr(refused, f) for f in refused.__slots__} | {"refused": True})
    tokens = given(name, started("long", 3000), online("a"), waiting=(held,))
    assert tokens["long"] > 50
    assert tokens["short"] == 0


@BOTH
def test_nobody_starts_before_an_overdue_one_that_lacks_place(name: str) -> None:
    overdue = RequestView("big", False, arrival=-50.0, tokens=3000, computed=0, refused=True)
    plan = make_policy(ServingSettings(name)).plan(view(waiting=(arrived("new", 50), overdue)), MODEL)
    assert plan.waiting == ("big", "new")


def test_one_that_ends_does_not_wait_for_a_part_of_the_next_nor_offline_work() -> None:
    behind = (arrived("next", 2500), arrived("third", 2600))
    tokens = given("prompts_in_order", started("ends", 50), offline("off"), waiting=behind)
    assert tokens == {"ends": 50, "off": 0, "next": 0, "third": 0}


def test_unless_the_next_is_overdue() -> None:
    tokens = given("prompts_in_order", started("ends", 50), waiting=(arrived("next", 2500, at=-50.0),))
    assert tokens["next"] > 0


def test_with_co_serving_iterations_are_full() -> None:
    tokens = given("conserve", started("ends", 50), waiting=(arrived("next", 2500),))
    assert tokens == {"ends": 50, "next": 2048 - 50}


def test_without_co_serving_offline_work_comes_last_and_its_tokens_go_on() -> None:
    running = offline("writes", 2000, 1999, last_token=9.9)
    tokens = given(
        "prompts_in_order", online("a"), running, offline("off", 9000), waiting=(arrived("new", 100),)
    )
    assert tokens["a"] == tokens["writes"] == 1
    assert tokens["new"] == 100
    assert tokens["off"] > 0
    work = BatchWork.of([(1, 99), (1, 1999), (100, 0), (tokens["off"], 0)])
    assert MODEL.seconds(work) <= 0.05


def test_one_that_came_after_the_plan_has_what_time_is_left_and_a_token_at_least() -> None:
    plan = make_policy(ServingSettings("prompts_in_order")).plan(view(online("a")), MODEL)
    assert plan.builder.take(online("a"), 1) == 1
    assert 1 < plan.builder.take(arrived("late", 3000), 2000) < 2000
    assert plan.builder.take(arrived("later", 3000), 2000) == 1


def test_who_is_ahead_goes_first_but_no_class_is_left_out_for_longer_than_that() -> None:
    first, gold = arrived("first", 2000, 10.0), replace(arrived("gold", 2000, 15.0), queue_weight=10.0)
    late = replace(gold, key="late", arrival=21.0)

    def order(classes: ClassOrder) -> list[str]:
        return [one.key for one in in_turn((first, late, gold), 22.0, MODEL, PromptSharing(0.05), classes)]

    served, classes = ClassOrder(), ClassOrder()
    assert order(classes) == ["first", "gold", "late"]  # nothing of its class was served for 10 s
    served.served(0.0, 21.5)
    assert order(served) == ["gold", "late", "first"]


def test_others_prompts_that_have_waited_long_cost_a_better_class_nothing_while_they_are_served() -> None:
    """An overload that lasts: all of the other class have waited for longer than the better is worth."""
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


def test_beside_a_better_class_lesser_requests_decode_in_turn_within_its_target() -> None:
    """Each lesser one takes 4.5 ms of a target of 30, of which the better one takes 5."""
    policy = make_policy(ServingSettings("prompts_in_order"))
    gold = replace(online("gold"), queue_weight=5.0, slo=TurnTargets(0.5, 0.03))
    others = [online(f"o{n}", 40_001, 40_000, last_token=9.0 + n / 100) for n in range(20)]
    served = fill(policy, view(gold, *others))
    assert served["gold"] == 1
    assert [key for key, tokens in served.items() if tokens] == ["gold", *(f"o{n}" for n in range(5))]
    tight = replace(gold, slo=TurnTargets(0.5, 0.006))
    anew = make_policy(ServingSettings("prompts_in_order"))
    one = fill(anew, view(tight, *others))
    assert [key for key, tokens in one.items() if tokens] == ["gold", "o0"], "one at least"
    none = fill(anew, view(tight, *others, now=10.04))
    assert [key for key, tokens in none.items() if tokens] == ["gold"], "their target of 50 ms allows it"
    next_one = fill(anew, view(tight, *others[1:], now=10.05))
    assert [key for key, tokens in next_one.items() if tokens] == ["gold", "o1"]
    alike = fill(policy, view(replace(gold, queue_weight=0.0), *others))
    assert all(alike.values()), "of one class all have their token"


def test_beside_a_prompt_of_a_better_class_lesser_requests_decode_in_a_tenth_of_the_time() -> None:
    """Each takes 0.5 ms of a target of 50; 20 of them would take a fifth of it."""
    policy = make_policy(ServingSettings("prompts_in_order"))
    others = [online(f"o{n}", 4_001, 4_000, last_token=9.0 + n / 100) for n in range(20)]
    gold = replace(arrived("gold", 3000, 9.9), queue_weight=5.0)
    alike = fill(policy, view(*others, waiting=(replace(gold, queue_weight=0.0),)))
    tokens = fill(policy, view(*others, waiting=(gold,)))
    assert sum(map(bool, alike.values())) == 21
    assert 7 <= sum(map(bool, tokens.values())) - 1 <= 10
    assert tokens["gold"] > 1.1 * alike["gold"]
    refused = replace(gold, refused=True)
    assert sum(map(bool, fill(policy, view(*others, waiting=(refused,))).values())) >= 20, "it has no place"


@pytest.mark.parametrize("name", ["prompts_in_order", "conserve"])
def test_a_better_class_s_last_part_is_alone_in_its_iteration_but_for_the_same_class(name: str) -> None:
    """The lesser prompt is overdue: of one class it would fill the iteration."""
    old, gold = arrived("old", 1000, -90.0), replace(arrived("gold", 300, 9.9), queue_weight=5.0)
    alike = replace(arrived("alike", 300, 9.9), queue_weight=5.0)
    policy = make_policy(ServingSettings(name))
    fill(policy, view(waiting=(old,), now=9.9))  # it is not left out: `old` had an iteration just now
    tokens = fill(policy, view(waiting=(old, gold, alike)))
    assert tokens == {"gold": 300, "alike": 300, "old": 0}
    beside_its_own = fill(policy, view(waiting=(old, replace(gold, queue_weight=0.0))))
    assert beside_its_own["old"] > 0
    batch, patient = offline("off", last_served=9.9), TurnTargets(1_000.0, 0.2)
    waiting = (replace(old, slo=patient), replace(gold, slo=patient))
    assert fill(policy, view(batch, waiting=waiting))["off"] == 0, "nor does a batch have that place"
    if name == "conserve":
        refused = (replace(waiting[0], refused=True), waiting[1])
        assert fill(policy, view(batch, waiting=refused))["off"] > 0, "nobody is denied it"


def test_a_starving_batch_request_has_its_token_where_a_prompt_is_held_back() -> None:
    policy, patient = make_policy(ServingSettings("conserve", ageing_s=10.0)), TurnTargets(1_000.0, 0.2)
    old = replace(arrived("old", 1000, -90.0), slo=patient)
    gold = replace(arrived("gold", 300, 9.9), queue_weight=5.0, slo=patient)
    served, starving = (
        offline("served", last_served=9.9, arrival=-60.0),
        offline("starving", last_served=-40.0, arrival=-50.0),
    )
    fill(policy, view(waiting=(old,), now=9.9))
    tokens = fill(policy, view(served, starving, waiting=(old, gold)))
    assert (tokens["gold"], tokens["old"], tokens["served"], tokens["starving"]) == (300, 0, 0, 1)


def test_a_lesser_prompt_between_two_better_ones_holds_up_neither() -> None:
    first = replace(arrived("first", 300, 9.9), queue_weight=8.0, priority_s=3.0)
    lesser = replace(arrived("lesser", 300, 9.9), queue_weight=7.0, priority_s=7.0)
    last = replace(arrived("last", 300, 9.9), queue_weight=5.0)
    tokens = fill(make_policy(ServingSettings("conserve")), view(waiting=(first, lesser, last)))
    assert tokens == {"first": 300, "lesser": 0, "last": 300}


def test_a_priority_takes_no_tokens_from_those_that_run() -> None:
    """Whoever asks may choose it: only where turns wait is it worth something."""
    policy = make_policy(ServingSettings("prompts_in_order"))
    others = [online(f"o{n}", 40_001, 40_000, last_token=9.0 + n / 100) for n in range(20)]
    urgent = replace(online("urgent"), queue_weight=10.0, priority_s=10.0, slo=TurnTargets(0.5, 0.03))
    assert all(fill(policy, view(urgent, *others)).values())
    prompt = replace(arrived("prompt", 3000, 9.9), queue_weight=10.0, priority_s=10.0)
    assert all(fill(policy, view(*others, waiting=(prompt,))).values())
    first = arrived("first", 3000, 9.8)
    plan = policy.plan(view(waiting=(first, prompt)), MODEL)
    assert plan.waiting is not None and plan.waiting[0] == "prompt"


def test_a_lesser_prompt_has_a_tenth_beside_a_better_class_and_half_beside_its_own() -> None:
    target = TurnTargets(0.5, 0.005)  # less than what decoding takes
    gold = online("gold", 20_001, 20_000, slo=target)
    decoding_s = MODEL.seconds(BatchWork.of([(1, 20_000)]))
    for queue_weight, share, joined in ((5.0, 0.1, 0.2), (0.0, 0.5, 1.0)):
        policy = make_policy(ServingSettings("prompts_in_order"))
        prompt = arrived("prompt", 30_000, 9.9)
        now, iterations = 10.0, []
        for _ in range(100):
            tokens = fill(policy, view(replace(gold, queue_weight=queue_weight), waiting=(prompt,), now=now))[
                "prompt"
            ]
            iterations.append(tokens)
            now += MODEL.seconds(BatchWork.of([(1, 20_000), (tokens, 0)] if tokens else [(1, 20_000)]))
        assert 0.9 * share < 1 - 100 * decoding_s / (now - 10.0) <= share + 0.02
        assert 0.5 * joined < sum(map(bool, iterations)) / 100 <= joined, "the rest it sits out"


@BOTH
def test_while_a_better_class_is_about_it_waits_no_longer_than_a_token_for_lesser_prompts(name: str) -> None:
    policy = make_policy(ServingSettings(name, TurnTargets(0.5, 0.05)))
    prompt = arrived("prompt", 2000, 10.0)
    free = fill(policy, view(waiting=(prompt,)))["prompt"]
    assert MODEL.seconds(BatchWork.of([(free, 0)])) > 0.1
    gold = replace(online("gold"), queue_weight=5.0)
    fill(policy, view(gold))
    beside = fill(policy, view(waiting=(prompt,), now=40.0))["prompt"]
    assert 0.04 < MODEL.seconds(BatchWork.of([(beside, 0)])) <= 0.05
    assert fill(policy, view(waiting=(replace(prompt, queue_weight=5.0),), now=41.0))["prompt"] == free
    priority = replace(prompt, key="urgent", queue_weight=9.0, priority_s=9.0)
    assert fill(policy, view(waiting=(priority,), now=42.0))["urgent"] < free, "a priority is no class"
    assert fill(policy, view(waiting=(prompt,), now=105.0))["prompt"] == free


@BOTH
def test_lesser_prompts_have_their_tenth_however_many_lesser_requests_decode(name: str) -> None:
    target = TurnTargets(0.5, 0.012)
    policy = make_policy(ServingSettings(name, target))
    gold = replace(online("gold", slo=target), queue_weight=5.0)
    others = [online(f"o{n}", 16_001, 16_000, slo=SLO) for n in range(40)]
    now, left, seconds = 10.0, 500, 0.0
    while left and seconds < 5.0:
        prompt = replace(started("prompt", left), slo=SLO)
        mine = [replace(one, last_token=now) for one in (gold, *others)]
        given_now = fill(policy, view(*mine, prompt, now=now))
        left -= given_now["prompt"]
        work = BatchWork.of((tokens, 16_000) for tokens in given_now.values() if tokens)
        now, seconds = now + MODEL.seconds(work), seconds + MODEL.seconds(work)
    assert not left and seconds < 2.0


@BOTH
def test_a_lesser_prompt_with_a_priority_keeps_no_better_prompt_from_its_turn(name: str) -> None:
    target = TurnTargets(0.5, 0.012)
    policy = make_policy(ServingSettings(name, target))
    gold = replace(online("gold", slo=target), queue_weight=5.0)
    urgent = replace(arrived("urgent", 16_000), queue_weight=10.0, priority_s=10.0)
    ended = 0
    for number in range(20):
        now = 10.0 + number / 50
        first = replace(arrived(f"first-{number}", 40, now), queue_weight=5.0)
        state = view(replace(gold, last_token=now), waiting=(urgent, first), now=now)
        ended += fill(policy, state)[first.key] == 40
    assert ended >= 18


@BOTH
def test_a_priority_makes_no_lesser_prompt_wait_for_lesser_ones_that_come_later(name: str) -> None:
    target = TurnTargets(0.5, 0.005)  # less than what decoding takes
    policy = make_policy(ServingSettings(name, target))
    gold = replace(online("gold", slo=target), queue_weight=5.0)
    now, left = 10.0, 200
    for number in range(150):
        urgent = replace(started("urgent", left), queue_weight=1.0, priority_s=1.0, arrival=10.0)
        later = arrived(f"later-{number}", 500, now)
        state = view(replace(gold, last_token=now), urgent, waiting=(later,), now=now)
        given_now = fill(policy, state)
        left -= given_now["urgent"]
        now += MODEL.seconds(BatchWork.of((n, 1000) for n in given_now.values() if n))
        if not left:
            break
    assert not left


@BOTH
@pytest.mark.parametrize("priority", range(1, 11))
def test_a_priority_makes_nobody_of_another_class(name: str, priority: int) -> None:
    policy = make_policy(ServingSettings(name))
    gold = replace(online("gold"), queue_weight=2.7)
    urgent = replace(arrived("urgent", 300), queue_weight=2.7 + priority, priority_s=float(priority))
    first = fill(
        policy, view(gold, waiting=(replace(urgent, key="first", queue_weight=2.7, priority_s=0.0),))
    )
    assert fill(make_policy(ServingSettings(name)), view(gold, waiting=(urgent,)))["urgent"] == first["first"]
    assert urgent.worth_s == gold.worth_s


@BOTH
def test_a_target_below_what_an_iteration_takes_leaves_lesser_prompts_half_of_it(name: str) -> None:
    policy = make_policy(ServingSettings(name, TurnTargets(0.5, 0.004)))  # an iteration's constant is 5 ms
    fill(policy, view(replace(online("gold"), queue_weight=5.0)))
    tokens = fill(policy, view(waiting=(arrived("prompt", 2000),), now=20.0))["prompt"]
    assert MODEL.seconds(BatchWork.of([(tokens, 0)])) > 1.9 * MODEL.seconds(BatchWork.of([(1, 0)]))
