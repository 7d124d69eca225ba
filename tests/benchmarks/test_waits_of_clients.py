"""Waits of clients around a kill are computed from given token times."""

from benchmarks.availability import Kill, Unavailability, seen
from benchmarks.chaos.__main__ import over_budget, unavailable_s
from benchmarks.chaos.faults import Fault
from benchmarks.harness.steady_clients import BOUND, NEW, STREAM, SteadyClient, SteadyClients


def clients(**arrivals: list[float]) -> SteadyClients:
    made = SteadyClients("http://h", "m")
    for one in made.clients:
        one.arrivals[:] = arrivals[one.kind]
    return made


def rows(made: SteadyClients, process: str) -> dict[str, Unavailability]:
    found = seen(made, {process: Kill(0.0, 10.0, 20.0)})
    return {row.clients: row for row in found if row.process == process}


QUIET = [one / 2 for one in range(21)]


def test_a_wait_that_overlaps_the_given_time_counts_with_its_whole_length() -> None:
    client = SteadyClient(NEW, "c", [1.0, 2.0, 9.0, 9.5, 25.0, 25.5])
    assert client.longest_wait(10.0, 20.0) == (9.5, 25.0)
    assert client.longest_wait(3.0, 9.2) == (2.0, 9.0)
    assert client.longest_wait(26.0, 30.0) == (25.5, 30.0)


def test_the_longest_wait_without_faults_is_subtracted_from_a_wait_after_a_kill() -> None:
    after = [one / 2 for one in range(30, 41)]
    found = rows(clients(new=[*QUIET, *after], bound=[*QUIET, 11.5, *after], stream=QUIET), "directory")
    assert found[NEW].unavailable_s == 5.0 - 0.5 and not found[NEW].over_budget
    assert found[BOUND].unavailable_s == 3.5 - 0.5 and found[BOUND].over_budget
    assert found[STREAM].longest_wait_s == 10.0, "until the end of the watch"


def test_a_cut_stream_exceeds_the_budget_of_a_killed_engine_but_not_of_a_gateway() -> None:
    made = clients(**{kind: [*QUIET, *(10 + one for one in QUIET)] for kind in (NEW, BOUND, STREAM)})
    made.clients[-1].failures.append((11.0, "cut"))
    assert rows(made, "decoder")[STREAM].over_budget
    assert not rows(made, "only_gateway")[STREAM].over_budget
    assert not any(row.over_budget for row in rows(made, "decoder").values() if row.clients != STREAM)


def test_waits_between_a_kill_and_the_next_fault_count_for_the_kill() -> None:
    made = clients(**{kind: [*QUIET, 13.0, 13.5, 20.0, 20.5] for kind in (NEW, BOUND, STREAM)})
    begun = [(10.1, Fault("kill", "a")), (14.0, Fault("stop", "b", 3.0)), (20.2, Fault("kill", "a"))]
    waits = unavailable_s(made, begun, (0.0, 10.0), 20.6)
    assert waits == {"a": dict.fromkeys((NEW, BOUND, STREAM), 2.5)}


def test_a_kill_during_a_lasting_fault_does_not_count() -> None:
    made = clients(**{kind: [*QUIET, 13.0, 20.0] for kind in (NEW, BOUND, STREAM)})
    begun = [(10.0, Fault("stop", "b", 3.0)), (10.1, Fault("kill", "a"))]
    assert unavailable_s(made, begun, (0.0, 10.0), 20.6) == {}


def test_chaos_compares_waits_after_a_kill_with_the_budget_of_the_killed_process() -> None:
    waits = {
        "router.gateway.main": {NEW: 5.9},
        "deploy.directory": {NEW: 5.9, BOUND: 1.1},
        "VLLM::EngineCore": {NEW: 9},
    }
    assert over_budget(waits, 1.0) == [
        "a client (bound) waited 1.1 s after kill deploy.directory; its budget is 0.0 s"
    ]
    assert len(over_budget(waits, 0.5)) == 3
