"""Lesser SLO classes beside a better one that decodes: who sits which iterations out, and loses nothing."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from placement.classes import ClassOrder
from placement.iteration.interface import (
    IterationDone,
    RequestView,
    ServingPolicy,
    ServingSettings,
    TurnTargets,
)
from placement.iteration.latency import BatchWork
from placement.iteration.online import share_out
from placement.iteration.policies import make_policy
from placement.iteration.prompts import PromptSharing
from placement.iteration.sitting_out import SittingOut
from tests.placement.iteration.views import MODEL, arrived, fill, offline, online, view

BOTH = pytest.mark.parametrize("name", ["conserve", "prompts_in_order"])
TIGHT, WIDE = TurnTargets(0.5, 0.01), TurnTargets(0.5, 0.05)  # alone an iteration takes 5.1 ms
FIRST = 10.0  # when the views' tokens were made


def better(key: str = "gold", **more: object) -> RequestView:
    return online(key, **{"ahead_s": 8.0, "class_s": 8.0, "slo": TIGHT, **more})


def better_prompt(key: str = "gold-prompt", tokens: int = 300, at: float = FIRST) -> RequestView:
    return replace(arrived(key, tokens, at), ahead_s=8.0, class_s=8.0, slo=TIGHT)


@dataclass
class Iterated:
    """A policy's iterations on the model's own clock."""

    policy: ServingPolicy
    running: dict[str, RequestView]
    waiting: dict[str, RequestView] = field(default_factory=dict)
    now: float = FIRST
    given: list[dict[str, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens_at: dict[str, list[float]] = field(default_factory=dict)

    def step(self) -> None:
        state = view(*self.running.values(), waiting=tuple(self.waiting.values()), now=self.now)
        given = {key: tokens for key, tokens in fill(self.policy, state).items() if tokens}
        everyone = self.running | self.waiting
        work = BatchWork.of((tokens, everyone[key].computed) for key, tokens in given.items())
        seconds = MODEL.seconds(work)
        self.now += seconds
        for key, tokens in given.items():
            self.waiting.pop(key, None)
            one = replace(everyone[key], computed=everyone[key].computed + tokens, running=True)
            if one.computed == one.tokens:
                one = replace(one, tokens=one.tokens + 1, last_token=self.now)
                self.tokens_at.setdefault(key, [FIRST]).append(self.now)
            self.running[key] = one
        self.policy.observe(IterationDone(self.now, work, seconds, seconds, len(given), 0, 0, False))
        self.given.append(given)
        self.seconds.append(seconds)

    def steps(self, number: int) -> "Iterated":
        for _ in range(number):
            self.step()
        return self

    def longest_gap_s(self, key: str) -> float:
        at = self.tokens_at[key]
        return max(later - earlier for earlier, later in pairwise(at))


def iterated(name: str, *running: RequestView, waiting: tuple[RequestView, ...] = ()) -> Iterated:
    policy = make_policy(ServingSettings(name, margin=0.0))
    return Iterated(policy, {one.key: one for one in running}, {one.key: one for one in waiting})


def others(count: int, **more: object) -> list[RequestView]:
    return [online(f"o{number}", **{"slo": WIDE, **more}) for number in range(count)]


@BOTH
def test_lesser_turns_decode_seldom_and_together_and_meet_their_own_target(name: str) -> None:
    seen = iterated(name, better(), *others(6)).steps(100)
    alone = [given for given in seen.given if list(given) == ["gold"]]
    assert len(alone) >= 80
    assert all(len(given) == 7 for given in seen.given if given not in alone)
    assert all("gold" in given for given in seen.given)
    for number in range(6):
        assert 0.035 < seen.longest_gap_s(f"o{number}") <= WIDE.tbt_s


@BOTH
def test_prompts_of_lesser_classes_advance_with_them_and_have_their_tenth(name: str) -> None:
    prompt = replace(arrived("prompt", 100_000), slo=WIDE)
    seen = iterated(name, better(), *others(3), waiting=(prompt,)).steps(200)
    with_prompt = [number for number, given in enumerate(seen.given) if "prompt" in given]
    assert len(with_prompt) <= 50
    assert all("o0" in seen.given[number] for number in with_prompt)
    without_s = MODEL.seconds(BatchWork.of([(1, 100)] * 4))
    prompts_s = sum(seen.seconds[number] - without_s for number in with_prompt)
    assert prompts_s > 0.09 * (seen.now - FIRST)
    assert all(seen.longest_gap_s(f"o{number}") <= WIDE.tbt_s for number in range(3))


@BOTH
def test_prompts_of_lesser_classes_advance_once_in_their_target_where_none_of_them_decodes(name: str) -> None:
    prompt = replace(arrived("prompt", 100_000), slo=WIDE)
    seen = iterated(name, better(), waiting=(prompt,)).steps(200)
    at, now = [], FIRST
    for given, seconds in zip(seen.given, seen.seconds, strict=True):
        now += seconds
        if "prompt" in given:
            at.append(now)
    assert len(at) <= 50
    assert max(later - earlier for earlier, later in pairwise(at)) < WIDE.tbt_s + 0.01


@BOTH
@pytest.mark.parametrize("after", range(1, 10))
def test_who_has_sat_out_meets_its_target_whatever_comes_next(name: str, after: int) -> None:
    """A better prompt comes, or the better turn ends and a long prompt has the place."""
    for came, ends in ((better_prompt(tokens=2000), False), (replace(arrived("long", 9000), slo=WIDE), True)):
        seen = iterated(name, better(), *others(6)).steps(after)
        if ends:
            del seen.running["gold"]
        seen.waiting[came.key] = replace(came, arrival=seen.now)
        since = len(seen.given)
        while not all(len(seen.tokens_at.get(f"o{n}", [])) > 2 for n in range(6)):
            seen.step()
        assert all(seen.longest_gap_s(f"o{number}") <= WIDE.tbt_s + 1e-9 for number in range(6))
        assert any(came.key in given for given in seen.given[since:])


@BOTH
def test_more_of_them_than_join_at_once_meet_their_target_too(name: str) -> None:
    """Four join within the better one's target: twelve have theirs in three iterations in a row."""
    seen = iterated(name, better(), *others(12, tokens=10_000, computed=9_999)).steps(60)
    assert any(list(given) == ["gold"] for given in seen.given)
    assert all(seen.longest_gap_s(f"o{number}") <= WIDE.tbt_s for number in range(12))


@BOTH
def test_who_is_late_already_is_in_the_batch(name: str) -> None:
    policy = make_policy(ServingSettings(name))
    late = online("late", slo=WIDE, last_token=FIRST - 0.06)
    early = online("early", slo=WIDE)
    assert fill(policy, view(better(), late, early))["late"] == 1
    assert fill(policy, view(better(), early))["early"] == 0


@BOTH
def test_a_short_prompt_of_a_better_class_has_its_iteration_to_itself(name: str) -> None:
    """A long one is cut, as beside any turn that decodes: these have their token with each piece."""
    waiting = replace(arrived("waiting", 300, FIRST - 5.0), slo=WIDE)
    for tokens, has in ((150, 0), (2000, 1)):
        policy = make_policy(ServingSettings(name))
        prompt = better_prompt(tokens=tokens, at=FIRST - 0.01)
        served = fill(policy, view(*others(2), waiting=(prompt, waiting)))
        assert served["gold-prompt"] > 100
        assert served["waiting"] == 0
        assert [served["o0"], served["o1"]] == [has, has]


@BOTH
def test_prompts_of_lesser_classes_are_not_left_out_for_longer_than_the_class_is_worth(name: str) -> None:
    """Prompts of the better class come without end, and one of its turns decodes all the time."""
    old = replace(arrived("old", 3000, FIRST), slo=WIDE)
    seen = iterated(name, better(), waiting=(old,))
    for number in range(2000):
        seen.waiting.setdefault("gold-prompt", better_prompt(tokens=300, at=seen.now))
        seen.step()
        done = seen.running.get("gold-prompt")
        if done is not None and done.last_token is not None:
            del seen.running["gold-prompt"]
            seen.tokens_at.pop("gold-prompt")
        if "old" in seen.given[-1]:
            break
        assert number < 1999 and seen.now < FIRST + 2 * 8.0
    assert seen.now > FIRST + 1.0


@BOTH
def test_a_priority_makes_nobody_sit_out(name: str) -> None:
    """Whoever sends it would have other tenants' tokens wait."""
    policy = make_policy(ServingSettings(name))
    served = fill(policy, view(better(class_s=0.0, ahead_s=1000.0), *others(3)))
    assert all(served.values())


@BOTH
@pytest.mark.parametrize("target", [WIDE, TurnTargets(0.5, 0.2)])
def test_nobody_sits_out_for_a_class_without_a_shorter_target(name: str, target: TurnTargets) -> None:
    policy = make_policy(ServingSettings(name))
    assert all(fill(policy, view(better(slo=target), *others(3))).values())


def test_offline_work_sits_out_with_them() -> None:
    served = fill(make_policy(ServingSettings("conserve")), view(better(), *others(2), offline("off")))
    assert served == {"gold": 1, "o0": 0, "o1": 0, "off": 0}
    aged = make_policy(ServingSettings("conserve", ageing_s=5.0))
    starving = offline("off", last_served=FIRST - 6.0)
    assert fill(aged, view(better(), *others(2), starving))["off"] == 1
    rows = fill(
        make_policy(ServingSettings("prompts_in_order")),
        view(better(), online("off", offline=True, slo=WIDE)),
    )
    assert rows == {"gold": 1, "off": 0}


def some_requests(rng: random.Random, class_s: Callable[[], float]) -> list[RequestView]:
    made = []
    for number in range(rng.randint(1, 12)):
        computed = rng.choice([0, 50, 5000])
        one = RequestView(
            f"r{number}", rng.random() < 0.1, FIRST - rng.random() * 20, computed + rng.choice([1, 1, 400]),
            computed, running=computed > 0, last_token=FIRST - rng.random() / 10 if computed else None,
            slo=TurnTargets(0.5, rng.choice([0.01, 0.05, 0.2])), refused=rng.random() < 0.1,
            ahead_s=rng.choice([0.0, 0.0, 3.0, -2.0]), class_s=class_s(),
        )  # fmt: skip
        made.append(one)
    return made


@pytest.mark.parametrize("class_s", [0.0, 5.0])
def test_without_several_classes_nothing_changes(class_s: float) -> None:
    """Whatever priorities and targets are asked for, whoever is late, in whatever order plans follow."""
    rng, with_it = random.Random(1), SittingOut(0.1)
    served, served_plainly = ClassOrder(), ClassOrder()
    for number in range(500):
        now = FIRST + number / 100
        requests, sharing = some_requests(rng, lambda: class_s), PromptSharing(rng.choice([0.005, 0.05]))
        plain = share_out(requests, now, 2048, MODEL, sharing, served_plainly)
        assert with_it.share_out(requests, now, 2048, MODEL, sharing, served) == plain


def test_with_several_classes_something_changes() -> None:
    """Of the same kind of requests as above."""
    rng, with_it = random.Random(1), SittingOut(0.1)
    changed = 0
    for _ in range(400):
        requests, sharing = some_requests(rng, lambda: rng.choice([0.0, 8.0])), PromptSharing(0.05)
        plain = share_out(requests, FIRST, 2048, MODEL, sharing, ClassOrder())
        changed += with_it.share_out(requests, FIRST, 2048, MODEL, sharing, ClassOrder()) != plain
    assert changed > 20
