"""Online requests come first, and offline requests fill only the time that the targets leave."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.scheduling.conserve import best_batch
from placement.scheduling.interface import RequestView, ServingSettings
from placement.scheduling.latency_model import BatchWork
from placement.scheduling.policy_registry import POLICIES, UnknownPolicyError, make_policy
from tests.placement.scheduling.views import MODEL, SLO, arrived, fill, offline, online, view

contexts = st.integers(1, 3000)


def seconds_of(requests: tuple[RequestView, ...], given_tokens: dict[str, int]) -> float:
    work = BatchWork.of((given_tokens[r.key], r.computed) for r in requests if given_tokens.get(r.key))
    return MODEL.seconds(work)


@settings(max_examples=200, deadline=None)
@given(st.lists(contexts, min_size=1, max_size=20), st.lists(contexts, max_size=20))
def test_an_iteration_with_online_requests_is_predicted_to_meet_the_tightest_tbt(
    online_contexts: list[int], offline_contexts: list[int]
) -> None:
    on = tuple(online(f"on{i}", c + 1, c) for i, c in enumerate(online_contexts))
    off = tuple(offline(f"off{i}", c + 500, c) for i, c in enumerate(offline_contexts))
    tokens = fill(make_policy(ServingSettings("conserve")), view(*off, *on, free=10_000))
    assert all(tokens[request.key] == 1 for request in on)
    if any(tokens[request.key] for request in off):
        assert seconds_of(on + off, tokens) <= SLO.tbt_s


def test_a_request_with_a_tighter_target_leaves_offline_work_fewer_tokens() -> None:
    policy = make_policy(ServingSettings("conserve"))
    loose = fill(policy, view(online("a"), offline("off")))["off"]
    tight = fill(policy, view(online("a"), online("b", slo=type(SLO)(0.5, 0.02)), offline("off")))["off"]
    assert 0 < tight < loose < 2000


def test_offline_work_leaves_tokens_for_waiting_online_requests() -> None:
    tokens = fill(
        make_policy(ServingSettings("conserve")), view(offline("off"), waiting=(arrived("new", 300),))
    )
    assert tokens["new"] == 300
    assert MODEL.seconds(BatchWork.of([(300, 0), (tokens["off"], 0)])) <= SLO.tbt_s


def test_offline_work_alone_fills_the_iteration() -> None:
    tokens = fill(make_policy(ServingSettings("conserve")), view(offline("a", 1500), offline("b", 1500)))
    assert sum(tokens.values()) == 2048


def test_offline_batches_shrink_when_arrivals_would_abort_them() -> None:
    sizes = [best_batch(MODEL, rate, 4096) for rate in (0.0, 5.0, 50.0)]
    assert sizes[0] == 4096
    assert sizes[0] > sizes[1] > sizes[2] >= 64


def test_the_online_only_policy_serves_no_offline_request() -> None:
    tokens = fill(
        make_policy(ServingSettings("online_only")), view(offline("off"), offline_head=offline("w"))
    )
    assert tokens == {"off": 0, "w": 0}


def test_sarathi_fills_its_chunk_however_long_the_context_is() -> None:
    policy = make_policy(ServingSettings("sarathi"))
    for context in (0, 1500):
        request = offline("off", 4000, context)
        assert fill(policy, view(online("on"), request, max_tokens=512))["off"] == 511


def test_the_non_preemptive_policy_takes_nothing_from_a_running_offline_request() -> None:
    state = view(offline("off", 4000), waiting=(arrived("new", 300),), free=0)
    plan = make_policy(ServingSettings("non_preemptive")).plan(state, MODEL)
    assert plan.preempt == ()
    assert fill(make_policy(ServingSettings("non_preemptive")), state)["off"] == 2048


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_gives_more_tokens_than_an_iteration_may_have(name: str) -> None:
    state = view(
        *(online(f"on{i}") for i in range(10)),
        *(offline(f"off{i}") for i in range(10)),
        waiting=(arrived("new", 3000),),
    )
    assert sum(fill(make_policy(ServingSettings(name)), state).values()) <= state.max_tokens


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "bros"])
def test_every_policy_gives_each_decoding_online_request_its_token(name: str) -> None:
    state = view(*(offline(f"off{i}", 100, 90) for i in range(10)), *(online(f"on{i}") for i in range(40)))
    tokens = fill(make_policy(ServingSettings(name)), state)
    assert all(tokens[f"on{i}"] == 1 for i in range(40))


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(UnknownPolicyError, match="bros, conserve"):
        make_policy(ServingSettings("fifo"))


def test_offline_work_beside_a_prompts_last_chunk_shrinks_when_its_ttft_is_near() -> None:
    policy = make_policy(ServingSettings("conserve"))
    early = online("on", tokens=300, computed=290, last_token=None, arrival=9.9)
    due = online("on", tokens=300, computed=290, last_token=None, arrival=9.51)
    assert fill(policy, view(early, offline("off")))["off"] > 100
    assert fill(policy, view(due, offline("off")))["off"] < 40
