"""Algorithm 1 decides which arrivals abort the running iteration."""

from dataclasses import replace

import pytest

from placement.scheduling.interface import (
    RunningBatch,
    ServingSettings,
)
from placement.scheduling.latency_model import BatchWork
from placement.scheduling.policy_registry import make_policy
from tests.placement.scheduling.views import MODEL, arrived, policy_with

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


def test_an_arrival_that_meets_its_ttft_does_not_raise_the_flag() -> None:
    assert not raises(replace(LONG, seconds=0.5), ttft_share=1.0)


def test_an_arrival_that_would_wait_for_more_than_a_share_of_its_ttft_raises_the_flag() -> None:
    within_the_target = replace(LONG, seconds=0.5)
    assert raises(within_the_target, ttft_share=0.5)
    assert not raises(replace(LONG, seconds=0.2), ttft_share=0.5)


def test_prompts_queued_before_an_arrival_add_to_its_waiting_time() -> None:
    almost = replace(LONG, seconds=0.5)
    assert raises(almost, queued=BatchWork.of([(300, 0)] * 5), ttft_share=1.0)


def test_a_batch_without_offline_requests_is_not_aborted() -> None:
    assert not raises(replace(LONG, offline_requests=0))


def test_an_iteration_that_is_nearly_done_is_not_aborted() -> None:
    assert not raises(replace(LONG, seconds=0.8, passed_s=0.799), queued=BatchWork.of([(9000, 0)]))


def test_an_iteration_is_not_aborted_if_that_loses_much_work_and_saves_little_time() -> None:
    late_in_it = replace(LONG, seconds=0.4, passed_s=0.3)  # its TTFT of 0.5 s is kept either way
    assert not raises(late_in_it)
    assert raises(late_in_it, ttft_share=0.25, abort_worth=0.3)
    assert raises(replace(late_in_it, passed_s=0.2)), "as much is won as is lost"


def test_an_arrival_that_would_miss_its_target_aborts_however_much_work_is_lost() -> None:
    assert raises(replace(LONG, seconds=1.6, passed_s=1.1))


def test_an_abort_does_not_make_online_requests_of_the_batch_late() -> None:
    mixed = replace(
        LONG, online_requests=4, online_work=BatchWork.of([(1, 500)] * 4), slack_s=0.05, passed_s=0.02
    )
    assert raises(mixed)
    assert not raises(replace(mixed, passed_s=0.048)), "their token would come after its deadline"
    assert not raises(replace(mixed, seconds=0.03), queued=BatchWork.of([(9000, 0)])), "redoing takes longer"


def test_without_safepoints_no_flag_is_raised() -> None:
    assert not raises(LONG, safepoints=False)


@pytest.mark.parametrize("policy", ["bros", "sarathi", "non_preemptive", "online_only"])
def test_only_the_conserve_policy_aborts_running_iterations(policy: str) -> None:
    chosen = make_policy(ServingSettings(policy))
    assert not chosen.interrupts(NEW, QUEUED, LONG, MODEL)
