"""Algorithm 1: which arrivals raise the flag of the running iteration."""

from dataclasses import replace

import pytest

from placement.scheduling.interface import (
    IterationDone,
    RunningBatch,
    ServingSettings,
    TurnTargets,
    YieldingPrompts,
)
from placement.scheduling.latency_model import BatchWork
from placement.scheduling.policy_registry import make_policy
from tests.placement.scheduling.views import MODEL, arrived, online, policy_with, view

WORK = BatchWork.of([(2000, 0)])
LONG = RunningBatch(
    WORK, BatchWork(), offline_requests=1, online_requests=0, seconds=0.8, passed_s=0.1, slack_s=None
)
NEW = arrived("new", 300)
QUEUED = BatchWork.of([(300, 0)])


def raises(
    batch: RunningBatch, queued: BatchWork = QUEUED, *, safepoints: bool = True, **constants: float
) -> bool:
    policy = policy_with(constants, safepoints=safepoints)
    return policy.interrupts(NEW, queued, batch, MODEL)


def test_an_arrival_that_would_miss_its_ttft_raises_the_flag() -> None:
    assert raises(LONG)


def test_one_that_meets_it_anyway_does_not() -> None:
    assert not raises(replace(LONG, seconds=0.5), ttft_share=1.0)


def test_an_arrival_may_be_made_to_wait_for_a_share_of_its_ttft_only() -> None:
    within_the_target = replace(LONG, seconds=0.5)
    assert raises(within_the_target, ttft_share=0.5)
    assert not raises(replace(LONG, seconds=0.2), ttft_share=0.5)


def test_what_is_queued_before_it_counts() -> None:
    almost = replace(LONG, seconds=0.5)
    assert raises(almost, queued=BatchWork.of([(300, 0)] * 5), ttft_share=1.0)


def test_a_batch_without_offline_requests_is_left_alone() -> None:
    assert not raises(replace(LONG, offline_requests=0))


def test_an_iteration_that_is_nearly_done_is_left_alone() -> None:
    assert not raises(replace(LONG, seconds=0.8, passed_s=0.799), queued=BatchWork.of([(9000, 0)]))


def test_much_work_is_not_thrown_away_for_a_little_sooner() -> None:
    late_in_it = replace(LONG, seconds=0.4, passed_s=0.3)  # its TTFT of 0.5 s is kept either way
    assert not raises(late_in_it)
    assert raises(late_in_it, ttft_share=0.25, abort_worth=0.3)
    assert raises(replace(late_in_it, passed_s=0.2)), "as much is won as is lost"


def test_whatever_it_costs_where_the_target_is_at_stake() -> None:
    assert raises(replace(LONG, seconds=1.6, passed_s=1.1))


def test_online_requests_of_the_batch_are_not_made_to_pay_for_nothing() -> None:
    mixed = replace(
        LONG, online_requests=4, online_work=BatchWork.of([(1, 500)] * 4), slack_s=0.05, passed_s=0.02
    )
    assert raises(mixed)
    assert not raises(replace(mixed, passed_s=0.048)), "their token would come after its deadline"
    assert not raises(replace(mixed, seconds=0.03), queued=BatchWork.of([(9000, 0)])), "redoing takes longer"


def test_no_flag_without_safepoints() -> None:
    assert not raises(LONG, safepoints=False)


@pytest.mark.parametrize("policy", ["bros", "sarathi", "non_preemptive", "online_only"])
def test_the_other_policies_preempt_between_iterations_only(policy: str) -> None:
    chosen = make_policy(ServingSettings(policy))
    assert not chosen.interrupts(NEW, QUEUED, LONG, MODEL)


# An iteration of prompts that are worth nothing, and of one that is worth a little; nothing is due yet.
PROMPTS = RunningBatch(
    BatchWork.of([(1, 500), (900, 0), (900, 0)]), BatchWork.of([(1, 500)]), offline_requests=0,
    online_requests=3, seconds=0.2, passed_s=0.02, slack_s=0.2,
    prompts=(
        YieldingPrompts(0.0, BatchWork.of([(900, 0)]), 60.0),
        YieldingPrompts(3.0, BatchWork.of([(900, 0)]), 60.0),
    ),
)  # fmt: skip
SHORT = BatchWork.of([(50, 0)])


@pytest.mark.parametrize(
    ("more", "raised"),
    [
        ({"queue_weight": 8.0}, True),
        ({"queue_weight": 3.0}, True),  # before one of the two
        ({}, False),  # no better than any
        ({"queue_weight": 8.0, "priority_s": 8.0}, False),  # whoever asks may choose that
        (
            {"queue_weight": -2.0, "priority_s": -10.0},
            False,
        ),  # a better class, but it waits behind
    ],
)
def test_an_arrival_goes_before_prompts_of_a_lesser_class(more: dict[str, float], raised: bool) -> None:
    better = replace(NEW, slo=TurnTargets(60.0, 0.05), **more)  # its target is not at stake
    assert policy_with({}).interrupts(better, SHORT, PROMPTS, MODEL) == raised


def test_but_not_where_as_much_is_thrown_away_or_tokens_come_late() -> None:
    better = replace(NEW, queue_weight=8.0, slo=TurnTargets(60.0, 0.05))
    policy = policy_with({})
    assert policy.interrupts(better, SHORT, PROMPTS, MODEL)
    assert not policy.interrupts(better, SHORT, replace(PROMPTS, passed_s=0.15), MODEL)
    assert not policy.interrupts(better, SHORT, replace(PROMPTS, slack_s=0.025), MODEL), "a token is due"
    assert not policy.interrupts(better, SHORT, replace(PROMPTS, prompts=(), offline_requests=1), MODEL)


def test_a_prompt_that_its_priority_puts_first_keeps_its_place() -> None:
    """The next plan would have it first again: the abort would only make both wait."""
    urgent = replace(arrived("urgent"), queue_weight=9.0, priority_s=9.0)
    prompts = (YieldingPrompts(urgent.place_s, BatchWork.of([(1800, 0)]), 60.0),)
    better = replace(NEW, queue_weight=5.0, slo=TurnTargets(60.0, 0.05))
    assert not policy_with({}).interrupts(better, SHORT, replace(PROMPTS, prompts=prompts), MODEL)
    assert policy_with({}).interrupts(
        replace(better, queue_weight=9.5), SHORT, replace(PROMPTS, prompts=prompts), MODEL
    )


def test_what_stays_is_not_computed_again_for_less_than_it_takes() -> None:
    """Nothing decodes, and what stays takes most of the iteration."""
    stays = YieldingPrompts(3.0, BatchWork.of([(1700, 0)]), 60.0)
    goes = YieldingPrompts(0.0, BatchWork.of([(100, 0)]), 60.0)
    batch = replace(PROMPTS, online_work=BatchWork(), slack_s=None, prompts=(goes, stays))
    better = replace(NEW, slo=TurnTargets(60.0, 0.05))
    assert not policy_with({}).interrupts(replace(better, queue_weight=3.0), SHORT, batch, MODEL)
    assert policy_with({}).interrupts(replace(better, queue_weight=3.5), SHORT, batch, MODEL)


def test_what_stays_of_the_prompts_is_computed_again_first() -> None:
    stays = PROMPTS.beside(3.0)
    assert stays.online_work == BatchWork.of([(1, 500), (900, 0)])
    assert [prompts.place_s for prompts in stays.prompts] == [0.0]
    assert PROMPTS.beside(8.0).online_work == PROMPTS.online_work


LESSER = arrived("lesser", 3000, 9.9)
BETTER = replace(arrived("better", 300, 9.9), queue_weight=5.0)


def done(aborted: bool) -> IterationDone:
    return IterationDone(10.0, BatchWork(), 0.1, 0.1, 1, 0, 0, aborted)


def test_prompts_yield_once_a_better_class_was_here_and_not_twice_in_a_row() -> None:
    policy = policy_with({})
    assert not policy.plan(view(waiting=(LESSER,)), MODEL).yields
    assert not policy.plan(view(waiting=(BETTER, LESSER)), MODEL).yields, "it computes a better one's, too"
    policy.observe(done(aborted=False))
    for aborted in (False, True):
        assert policy.plan(view(waiting=(LESSER,)), MODEL).yields
        policy.observe(done(aborted))
    assert not policy.plan(view(waiting=(LESSER,)), MODEL).yields, "it was left: this one goes on to its end"
    policy.observe(done(aborted=False))
    assert policy.plan(view(waiting=(LESSER,)), MODEL).yields
    assert not policy.plan(view(waiting=(LESSER,), now=80.0), MODEL).yields, "a minute later none is expected"


def test_nothing_yields_beside_tokens_of_the_better_class_or_without_safepoints() -> None:
    decoding = replace(online("gold"), queue_weight=5.0)
    for policy, yields in ((policy_with({}), True), (policy_with({}, safepoints=False), False)):
        policy.plan(view(waiting=(BETTER,)), MODEL)
        assert policy.plan(view(waiting=(LESSER,)), MODEL).yields == yields
        assert not policy.plan(view(decoding, waiting=(LESSER,)), MODEL).yields


def test_what_a_lesser_class_has_by_right_does_not_yield() -> None:
    """It was left out for as long as the better class is worth: now it goes first, and to its end."""
    policy = policy_with({})
    old = replace(LESSER, arrival=0.0)
    policy.plan(view(waiting=(BETTER,)), MODEL)
    assert policy.plan(view(waiting=(old,), now=10.1), MODEL).yields
    for now, first in ((12.0, "better"), (15.5, "lesser")):
        plan = policy.plan(view(waiting=(BETTER, old), now=now), MODEL)
        assert plan.waiting is not None
        assert plan.waiting[0] == first
        assert not plan.yields


def test_of_a_step_that_was_not_planned_nothing_is_concluded() -> None:
    policy = policy_with({})
    policy.plan(view(waiting=(BETTER,)), MODEL)
    policy.observe(done(aborted=False))
    assert policy.plan(view(waiting=(LESSER,)), MODEL).yields
    policy.observe(done(aborted=True))
    policy.observe(done(aborted=False))  # by vLLM's own rules
    assert not policy.plan(view(waiting=(LESSER,)), MODEL).yields
