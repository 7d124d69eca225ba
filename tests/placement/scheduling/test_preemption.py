"""Online requests take only the blocks and slots that they lack from offline requests."""

import pytest

from placement.scheduling.interface import ServingSettings
from placement.scheduling.policy_registry import make_policy
from tests.placement.scheduling.views import MODEL, arrived, offline, online, view

PREEMPTING = ["conserve", "bros", "sarathi", "online_only"]


def preempted(name: str, state: object) -> tuple[str, ...]:
    return make_policy(ServingSettings(name)).plan(state, MODEL).preempt  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PREEMPTING)
def test_nothing_is_preempted_while_blocks_and_slots_suffice(name: str) -> None:
    assert preempted(name, view(offline("a", 900, 800), waiting=(arrived("new", 300),), free=19)) == ()


@pytest.mark.parametrize("name", PREEMPTING)
def test_only_one_offline_request_is_preempted_if_its_blocks_suffice(name: str) -> None:
    requests = [offline(f"off{i}", 900, 800, arrival=float(i)) for i in range(5)]
    assert len(preempted(name, view(*requests, waiting=(arrived("new", 300),), free=0))) == 1


@pytest.mark.parametrize("name", PREEMPTING)
def test_a_full_batch_preempts_one_offline_request_for_a_slot(name: str) -> None:
    requests = [offline(f"off{i}", 900, 800) for i in range(4)]
    state = view(*requests, waiting=(arrived("new"),), max_running=4)
    assert len(preempted(name, state)) == 1


@pytest.mark.parametrize("name", PREEMPTING)
def test_online_requests_are_never_preempted(name: str) -> None:
    state = view(online("a"), offline("off", 50, 48), waiting=(arrived("new", 9000),), free=0, max_running=2)
    assert set(preempted(name, state)) <= {"off"}


def test_a_running_online_request_that_grows_takes_blocks_of_offline_requests() -> None:
    growing = online("on", tokens=97, computed=96)
    assert preempted("conserve", view(growing, offline("off", 900, 800), free=0)) == ("off",)


def test_conserve_preempts_requests_whose_blocks_are_on_the_host_first() -> None:
    saved = offline("saved", 900, 800, saved_blocks=50, arrival=1.0)
    unsaved = offline("unsaved", 900, 800, saved_blocks=3, arrival=2.0)
    assert preempted("conserve", view(saved, unsaved, waiting=(arrived("new", 300),), free=0)) == ("saved",)


def test_requests_without_tokens_in_this_iteration_ask_for_no_blocks() -> None:
    queue = tuple(arrived(f"new{i}", 2000) for i in range(10))
    requests = [offline(f"off{i}", 1700, 1600) for i in range(10)]
    assert len(preempted("conserve", view(*requests, waiting=queue, free=0, max_tokens=2000))) == 2


def test_no_offline_request_starts_in_an_iteration_that_preempts() -> None:
    plan = make_policy(ServingSettings("conserve")).plan(
        view(offline("a", 900, 800), waiting=(arrived("new", 300),), free=0), MODEL
    )
    assert plan.builder.take(offline("b", running=False), 10) == 0
