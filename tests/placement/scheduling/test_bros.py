"""BROS serves urgent requests and cheap swap-ins first, and resets its batch size after a missed deadline."""

from placement.scheduling.interface import IterationDone, ServingSettings
from placement.scheduling.policy_registry import make_policy
from tests.placement.scheduling.views import MODEL, fill, offline, online, policy_with, view


def done(late: int = 0) -> IterationDone:
    return IterationDone(10.0, 0.01, 0.01, late, aborted=False)


def test_online_requests_are_ordered_by_time_to_their_deadline() -> None:
    requests = (
        online("calm", last_token=10.0),
        online("urgent", last_token=9.96),
        online("next", last_token=9.98),
    )
    plan = make_policy(ServingSettings("bros")).plan(view(*requests), MODEL)
    assert plan.order == ("urgent", "next", "calm")


def test_offline_requests_are_ordered_by_blocks_to_restore() -> None:
    requests = (offline("far", restore_blocks=30), offline("near"), offline("mid", restore_blocks=5))
    assert make_policy(ServingSettings("bros")).plan(view(*requests), MODEL).order == ("near", "mid", "far")


def test_waiting_offline_requests_start_in_order_of_blocks_to_restore() -> None:
    first = offline("first", restore_blocks=30, running=False)
    waiting = [first, offline("second", arrival=1.0, running=False)]
    for name, expected in (("bros", ["second", "first"]), ("conserve", ["first", "second"])):
        policy = make_policy(ServingSettings(name))
        assert [request.key for request in sorted(waiting, key=policy.start_order)] == expected


def test_the_iteration_ends_before_the_most_urgent_deadline() -> None:
    policy = make_policy(ServingSettings("bros"))
    soon = fill(policy, view(online("on", last_token=9.97), offline("off")))["off"]
    later = fill(policy, view(online("on", last_token=9.99), offline("off")))["off"]
    assert 0 < soon < later


def test_the_batch_grows_by_one_and_is_reset_after_a_missed_deadline() -> None:
    policy = policy_with({"batch_start": 2}, "bros")
    requests = [offline(f"off{i}", 100, 99) for i in range(10)]
    served = []
    for late in (0, 0, 0, 1, 0):
        served.append(sum(fill(policy, view(*requests)).values()))
        policy.observe(done(late))
    assert served == [2, 3, 4, 5, 2]


def test_requests_with_time_to_spare_give_their_slot_to_offline_requests() -> None:
    policy = policy_with({"batch_start": 3}, "bros")
    calm = [online(f"calm{i}", last_token=10.0) for i in range(2)]
    tokens = fill(policy, view(online("urgent", last_token=9.975), *calm, offline("off", 100, 99)))
    assert tokens["urgent"] == 1
    assert tokens["off"] == 1
    assert sum(tokens[request.key] for request in calm) == 1
