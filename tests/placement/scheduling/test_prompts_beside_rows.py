"""Decoding requests get their token, and an online prompt gets the time that is left."""

from placement.scheduling.interface import IterationDone, ServingSettings, TurnTargets
from placement.scheduling.latency_model import BatchWork
from placement.scheduling.policy_registry import make_policy
from tests.placement.scheduling.views import MODEL, SLO, arrived, fill, offline, online, view

URGENT = arrived("new", 300, at=9.8)  # it takes 35 ms itself, and its target is 45 ms
LONG = arrived("new", 1500, at=9.8)


def conserve(**settings: float) -> object:
    return make_policy(ServingSettings(**settings))  # type: ignore[arg-type]


def given(*requests: object, **more: object) -> dict[str, int]:
    return fill(conserve(), view(*requests, **more))  # type: ignore[arg-type]


def test_offline_work_has_no_tokens_beside_an_urgent_prompt() -> None:
    assert given(online("a"), offline("off"), waiting=(URGENT,)) == {"a": 1, "off": 0, "new": 300}


def test_offline_work_joins_a_prompt_that_has_time() -> None:
    tokens = given(online("a"), offline("off"), waiting=(arrived("new", 300),))
    assert tokens["a"] == 1
    assert tokens["new"] == 300
    assert tokens["off"] > 0


def test_a_prompt_gets_the_time_until_the_next_token_is_due() -> None:
    fresh = given(online("a"), waiting=(LONG,))
    set_back = given(online("a", last_token=9.98), waiting=(LONG,))
    assert 0 < set_back["new"] < fresh["new"] < 1500
    for tokens, left_s in ((fresh, 0.05), (set_back, 0.03)):
        assert MODEL.seconds(BatchWork.of([(1, 99), (tokens["new"], 0)])) <= left_s


def test_a_running_prompt_does_not_take_tokens_of_decoding_requests() -> None:
    half = online("half", 3000, 1000, last_token=None, arrival=-5.0)
    tokens = given(half, online("a", last_token=9.97), max_tokens=60)
    assert tokens == {"a": 1, "half": 59}


def test_late_decoding_requests_leave_a_prompt_half_of_the_iteration() -> None:
    requests = [online(f"a{i}", 3000, 2999, last_token=9.0) for i in range(20)]
    tokens = given(*requests, waiting=(LONG,))
    assert all(tokens[request.key] == 1 for request in requests)
    requests_s = MODEL.seconds(BatchWork.of([(1, 2999)] * 20))
    assert MODEL.seconds(BatchWork.of([(1, 2999)] * 20 + [(tokens["new"], 0)])) > 1.9 * requests_s


def test_offline_work_has_less_time_when_a_token_is_due_sooner() -> None:
    rested, waited = (given(online("a", last_token=at), offline("off"))["off"] for at in (10.0, 9.97))
    assert 0 < waited < rested


def test_a_prompt_gets_the_whole_iteration_if_no_request_decodes() -> None:
    assert given(waiting=(arrived("new", 3000, at=9.0),))["new"] == 2048


def test_offline_work_gets_less_time_the_more_iterations_exceed_their_prediction() -> None:
    def offline_tokens_after(seconds: float) -> int:
        policy = make_policy(ServingSettings(margin=0.1))
        for _ in range(300):
            policy.observe(IterationDone(10.0, 0.04, seconds, 0, aborted=False))
        return fill(policy, view(online("a", slo=TurnTargets(SLO.ttft_s, 0.05)), offline("off")))["off"]

    exact, configured, slow = (
        offline_tokens_after(0.04),
        given(online("a"), offline("off"))["off"],
        offline_tokens_after(0.048),
    )
    assert slow < configured < exact


def test_occasional_late_iterations_cost_offline_tokens_but_no_prompt_tokens() -> None:
    policy = make_policy(ServingSettings(margin=0.1))
    for number in range(2_000):
        seconds = 0.048 if number % 10 == 0 else 0.04
        policy.observe(IterationDone(10.0, 0.04, seconds, 0, aborted=False))
    request = online("a")
    prompt = fill(policy, view(request, waiting=(LONG,)))["new"]
    beside = fill(policy, view(request, offline("off", 5000)))["off"]
    assert MODEL.seconds(BatchWork.of([(1, 99), (prompt, 0)])) > 0.97 * SLO.tbt_s
    assert MODEL.seconds(BatchWork.of([(1, 99), (beside, 0)])) < 0.88 * SLO.tbt_s
