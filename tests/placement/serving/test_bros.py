"""BROS: urgent first, cheap swaps first, a batch size that grows slowly and falls at once."""

from placement.latency import BatchWork
from placement.serving import ServingSettings, make_policy
from placement.serving.state import IterationDone
from tests.placement.serving.views import MODEL, fill, offline, online, view


def done(late: int = 0) -> IterationDone:
    return IterationDone(10.0, BatchWork(), 0.01, 0.01, 1, 1, late, aborted=False)


def test_online_rows_are_ordered_by_time_to_their_deadline() -> None:
    rows = (
        online("calm", last_token=10.0),
        online("urgent", last_token=9.96),
        online("next", last_token=9.98),
    )
    plan = make_policy(ServingSettings("bros")).plan(view(*rows), MODEL)
    assert plan.order == ("urgent", "next", "calm")


def test_offline_rows_are_ordered_by_what_they_must_bring_back() -> None:
    rows = (offline("far", restore_blocks=30), offline("near"), offline("mid", restore_blocks=5))
    assert make_policy(ServingSettings("bros")).plan(view(*rows), MODEL).order == ("near", "mid", "far")


def test_the_iteration_ends_before_the_most_urgent_deadline() -> None:
    policy = make_policy(ServingSettings("bros"))
    soon = fill(policy, view(online("on", last_token=9.97), offline("off")))["off"]
    later = fill(policy, view(online("on", last_token=9.99), offline("off")))["off"]
    assert 0 < soon < later


def test_the_batch_grows_by_one_and_falls_at_once() -> None:
    policy = make_policy(ServingSettings("bros", batch_start=2))
    rows = [offline(f"off{i}", 100, 99) for i in range(10)]
    served = []
    for late in (0, 0, 0, 1, 0):
        served.append(sum(fill(policy, view(*rows)).values()))
        policy.observe(done(late))
    assert served == [2, 3, 4, 5, 2]


def test_rows_with_time_to_spare_give_their_place_to_offline_rows() -> None:
    policy = make_policy(ServingSettings("bros", batch_start=3))
    calm = [online(f"calm{i}", last_token=10.0) for i in range(2)]
    tokens = fill(policy, view(online("urgent", last_token=9.975), *calm, offline("off", 100, 99)))
    assert tokens["urgent"] == 1
    assert tokens["off"] == 1
    assert sum(tokens[row.key] for row in calm) == 1
