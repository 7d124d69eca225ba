"""The policy decides on plain data which requests run next, and on which engine."""

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from placement.engines import EngineState, Role, SplitState
from placement.overload.drop_plan import EngineShape
from router.batch.config import DispatchSettings
from router.batch.dispatch.policy import (
    SUSPECT_AFTER,
    Allowance,
    EngineSlots,
    FairShare,
    Rate,
    allowance_of,
    assign,
    share_out,
)
from router.batch.store.records import Backlog

R40 = Allowance(40, 10**9)
SETTINGS = DispatchSettings(max_in_flight=64)


@dataclass(frozen=True)
class PolicyLine:
    name: int
    prefix: str = "0" * 24
    est_tokens: int = 100
    tries: int = 0


def state(**changes: int | bool) -> EngineState:
    plain = EngineState("e", 1, 1, 1_000, 0, 0, 90_000, 0, 0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def view(name: str = "e", reported: EngineState | None = None, **changes: object) -> EngineSlots:
    plain = EngineSlots(name, Role.DECODE, 100_000, reported or state(), 0, 0, 0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def backlog(batch: int, owner: str, pending: int = 1_000, expires_at: int = 86_400) -> Backlog:
    return Backlog(batch, owner, pending, 0, True, 100, 0, expires_at)


def test_an_idle_decoder_gets_a_short_queue_of_offline_requests() -> None:
    assert allowance_of(view(), SETTINGS).requests == 4
    assert allowance_of(view(in_flight=3), SETTINGS).requests == 1


def test_a_decoders_window_grows_with_its_running_offline_requests() -> None:
    running = state(offline_running=10)
    assert allowance_of(view(reported=running, in_flight=10), SETTINGS).requests == 4
    stuck = state(offline_running=10, offline_waiting=4)
    assert allowance_of(view(reported=stuck, in_flight=14), SETTINGS).requests == 0


def test_an_engine_with_many_waiting_answers_gets_no_more_requests() -> None:
    """One request for 128 answers counts as 128 requests in its engine."""
    many = state(offline_running=256, offline_waiting=384)
    assert allowance_of(view(reported=many, in_flight=5), SETTINGS).requests == 0
    few = state(offline_running=128, offline_waiting=0)
    assert allowance_of(view(reported=few, in_flight=1), SETTINGS).requests == 4


def test_an_engine_that_shares_layers_gets_no_offline_requests() -> None:
    shape = EngineShape(4, 1.0, 1_000, 1.0, 1.0, 1.0, None)
    for epoch, requests in ((0, 4), (3, 0)):
        shares = replace(state(), split=SplitState("host:1", shape, epoch))
        assert allowance_of(view(reported=shares), SETTINGS).requests == requests


def test_an_engine_where_turns_wait_gets_one_offline_request_after_a_long_time() -> None:
    pressed = state(offline_running=10, waiting=1)
    assert allowance_of(view(reported=pressed), SETTINGS).requests == 0
    assert allowance_of(view(reported=pressed, starved=True), SETTINGS).requests == 1
    assert allowance_of(view(reported=pressed, starved=True, in_flight=1), SETTINGS).requests == 0


def test_an_engine_without_spare_kv_runs_one_offline_request_at_a_time() -> None:
    full = state(free_tokens=9_000, offline_running=10)
    assert allowance_of(view(reported=full), SETTINGS).requests == 1
    assert allowance_of(view(reported=full, in_flight=1), SETTINGS).requests == 0
    assert allowance_of(view(reported=state(free_tokens=12_000), unseen_tokens=2_000), SETTINGS).requests == 1


def test_idle_kv_that_has_a_copy_on_the_host_counts_as_spare() -> None:
    idle = state(free_tokens=9_000, idle_tokens=21_000, offline_running=10)
    assert allowance_of(view(reported=idle), SETTINGS).tokens == 20_000
    assert allowance_of(view(reported=idle), SETTINGS).requests > 1


def test_engines_that_drain_or_pause_after_errors_get_no_offline_requests() -> None:
    assert allowance_of(view(reported=state(draining=True)), SETTINGS).requests == 0
    assert allowance_of(view(resting=True), SETTINGS).requests == 0


def test_a_prefiller_gets_offline_work_only_if_configured_and_idle_or_co_serving() -> None:
    prefiller = view(role=Role.PREFILL)
    assert allowance_of(prefiller, SETTINGS).requests == 0
    wanted = replace(SETTINGS, harvest_prefill=True)
    assert allowance_of(prefiller, wanted).requests == 4
    busy = view(role=Role.PREFILL, reported=state(running=1))
    assert allowance_of(busy, wanted).requests == 0
    assert allowance_of(busy, replace(wanted, coserving=True)).requests == 4


def test_an_engine_that_has_not_reported_gets_a_fixed_window_of_requests() -> None:
    silent = replace(view(), state=None)
    assert allowance_of(silent, replace(SETTINGS, blind_window=5)).requests == 5


def test_two_owners_get_equal_tokens_regardless_of_their_batch_sizes() -> None:
    fair = FairShare()
    taken, urgent = share_out([backlog(1, "big", 100_000), backlog(2, "small", 50)], R40, fair, 0, 0)
    assert taken == {1: 20, 2: 20} and urgent == 0


def test_an_owners_batch_with_the_earliest_deadline_goes_first() -> None:
    soon, late = backlog(1, "a", 5, expires_at=500), backlog(2, "a", 100, expires_at=900)
    taken, _ = share_out([late, soon], Allowance(8, 10**9), FairShare(), 0, 0)
    assert taken == {1: 5, 2: 3}


def test_a_batch_that_must_end_soon_gets_most_of_the_free_slots_but_not_all() -> None:
    tight = backlog(1, "hasty", 1_000, expires_at=100)  # 100,000 tokens at 1,000 a second: just in time
    taken, urgent = share_out([backlog(2, "calm"), tight], R40, FairShare(), 0, 1_000)
    assert urgent == 30 and taken[1] >= 30 and taken[2] == 40 - taken[1] > 0


def test_a_batch_gets_no_more_slots_than_it_has_lines_to_run() -> None:
    assert share_out([backlog(1, "a", 3)], R40, FairShare(), 0, 0) == ({1: 3}, 0)
    assert share_out([replace(backlog(1, "a"), accepting=False)], R40, FairShare(), 0, 0) == ({}, 0)


def test_no_more_lines_are_taken_than_free_kv_allows() -> None:
    taken, _ = share_out([backlog(1, "a")], Allowance(40, 1_050), FairShare(), 0, 0)
    assert taken == {1: 10}
    taken, _ = share_out([backlog(1, "a")], Allowance(40, 50), FairShare(), 0, 0)
    assert taken == {1: 1}  # a line larger than all free KV runs alone, or it would wait for ever


def test_an_owner_with_new_work_begins_level_with_the_owners_served_before() -> None:
    fair = FairShare()
    fair.restrict({"a"})
    fair.charge("a", 1_000)
    fair.restrict({"a", "b"})
    fair.charge("b", 1)
    assert fair.next({"a", "b"}) == "a"  # b began level with a, and was then served more


def test_the_least_loaded_decoder_gets_the_next_offline_request() -> None:
    idle, busy = view("idle"), view("busy", state(live_tokens=90_000))
    allowances = {"idle": Allowance(2, 10_000), "busy": Allowance(9, 10_000)}
    placed, left = assign([PolicyLine(i, f"{i:024}") for i in range(4)], [busy, idle], allowances, {})
    assert [engine for _, engine in placed][:2] == ["idle", "idle"] and not left
    assert [engine for _, engine in placed][2:] == ["busy", "busy"]


def test_requests_with_a_common_prefix_go_to_one_decoder() -> None:
    views = [view("x"), view("y")]
    allowances = {"x": Allowance(8, 10_000), "y": Allowance(8, 10_000)}
    jobs = [PolicyLine(i, group * 16 + "0" * 8) for group in "ab" for i in range(4)]
    placed, _ = assign(jobs, views, allowances, {})
    homes = {group: {engine for job, engine in placed if job.prefix[0] == group} for group in "ab"}
    assert len(homes["a"]) == len(homes["b"]) == 1 and homes["a"] != homes["b"]
    placed, _ = assign([PolicyLine(9, "a" * 16 + "1" * 8)], views, allowances, {"a" * 16: "y"})
    assert placed[0][1] == "y"


def test_a_job_does_not_wait_for_a_full_engine_that_holds_its_prefix() -> None:
    allowances = {"x": Allowance(0, 10_000), "y": Allowance(8, 10_000)}
    placed, left = assign([PolicyLine(1)], [view("x"), view("y")], allowances, {"0" * 16: "x"})
    assert [engine for _, engine in placed] == ["y"] and not left


def test_an_engine_runs_requests_that_failed_twice_one_at_a_time() -> None:
    suspects = [PolicyLine(i, tries=SUSPECT_AFTER) for i in range(3)]
    placed, left = assign(suspects, [view()], {"e": Allowance(8, 10_000)}, {})
    assert len(placed) == 1 and len(left) == 2
    placed, _ = assign(suspects, [view(suspects=1)], {"e": Allowance(8, 10_000)}, {})
    assert not placed


def test_jobs_assigned_together_do_not_exceed_the_free_kv() -> None:
    jobs = [PolicyLine(i, est_tokens=600) for i in range(4)]
    placed, left = assign(jobs, [view()], {"e": Allowance(8, 1_500)}, {})
    assert (len(placed), len(left)) == (2, 2)
    placed, _ = assign([PolicyLine(1, est_tokens=9_000)], [view()], {"e": Allowance(8, 1_500)}, {})
    assert len(placed) == 1  # a job larger than all free KV runs alone, or it would wait for ever


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 500), st.integers(0, 3)), max_size=60),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 3_000), st.integers(0, 99_000)), min_size=1, max_size=6
    ),
)
def test_each_job_is_assigned_at_most_once_within_the_engines_allowances(
    jobs: list[tuple[int, int, int]], engines: list[tuple[int, int, int]]
) -> None:
    lines = [PolicyLine(i, f"{prefix:024}", tokens, tries) for i, (prefix, tokens, tries) in enumerate(jobs)]
    views = [view(f"e{i}", state(live_tokens=live)) for i, (_, _, live) in enumerate(engines)]
    allowances = {f"e{i}": Allowance(requests, tokens) for i, (requests, tokens, _) in enumerate(engines)}
    placed, left = assign(lines, views, allowances, {})
    assert sorted(line.name for line in [*(job for job, _ in placed), *left]) == list(range(len(lines)))
    for name, allowance in allowances.items():
        given_here = [job for job, engine in placed if engine == name]
        assert len(given_here) <= allowance.requests
        rest = sum(job.est_tokens for job in given_here[1:])
        assert rest <= max(0, allowance.tokens) or len(given_here) <= 1


@given(
    st.dictionaries(st.sampled_from("abcdefghij"), st.integers(1, 5_000), min_size=2), st.integers(10, 400)
)
def test_each_owner_gets_at_least_its_equal_share_of_the_free_slots(sizes: dict[str, int], room: int) -> None:
    lots = [backlog(i, owner, pending) for i, (owner, pending) in enumerate(sizes.items(), start=1)]
    taken, _ = share_out(lots, Allowance(room, 10**9), FairShare(), 0, 0)
    least_owed = room // len(sizes)
    for lot in lots:
        assert taken.get(lot.batch, 0) >= min(lot.pending, least_owed)
    assert sum(taken.values()) == min(room, sum(sizes.values()))


def test_the_rate_after_a_pause_ignores_the_rate_before_it() -> None:
    """An old rate that has decayed to nearly zero would make the window of every batch count as tight."""
    now = 0.0
    rate = Rate(lambda: now)
    for _ in range(60):
        now += 1.0
        rate.add(1_000)
    assert 800 < rate.value < 1_200
    now += 3_600.0
    rate.idle()
    assert rate.value == 0.0, "nothing is known"
    rate.add(1_000)
    assert rate.value >= 500
