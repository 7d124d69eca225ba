"""The store's promises, on SQLite and PostgreSQL."""

import threading
from collections.abc import Iterator

import pytest

from router.batch.records import BatchRecord, BatchStatus, FileRecord, NewRequest, Result
from router.batch.store.batches import ENDS, VALIDATES
from router.batch.store.requests import PutBack
from router.batch.store.store import Store

LEASE_S = 10.0


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    made = Store(store_url)
    yield made
    made.close()


def running(store: Store, lines: int = 10, owner: str = "o") -> BatchRecord:
    """A batch in progress, brought there by the dispatcher `d`."""
    store.requests.heartbeat("d", 0, LEASE_S)
    store.files.add(FileRecord(f"file-{owner}", 0, owner, "f", "batch", 1, 0, None))
    store.batches.create(
        f"batch-{owner}", owner, "/v1/completions", f"file-{owner}", "24h", 86_400, None, None, 0
    )
    batch = store.batches.take_up("d", VALIDATES)
    assert batch is not None
    rows = [NewRequest(n, f"c{n}", 0, 1, f"{n % 3:024}", 10) for n in range(1, lines + 1)]
    assert store.requests.load(batch.seq, "d", rows)
    assert store.batches.begin(batch.seq, "d", "m", lines, 10 * lines, 1)
    return batch


def good(batch: BatchRecord, line: int, text: str = "1") -> Result:
    return Result(batch.seq, line, 200, text.encode(), "r")


def test_a_line_is_leased_by_one_dispatcher(store: Store) -> None:
    batch = running(store, 200)
    for name in "abcd":
        store.requests.heartbeat(name, 0, LEASE_S)
    claimed: dict[str, list[int]] = {name: [] for name in "abcd"}

    def work(name: str) -> None:
        for _ in range(5):
            claimed[name] += [line.line for line in store.requests.claim({batch.seq: 10}, name, 1)]

    threads = [threading.Thread(target=work, args=(name,)) for name in claimed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = sorted(line for lines in claimed.values() for line in lines)
    assert everything == list(range(1, 201))


def test_lines_with_a_common_prefix_come_together(store: Store) -> None:
    batch = running(store, 9)
    prefixes = [line.prefix for line in store.requests.claim({batch.seq: 9}, "d", 1)]
    assert prefixes == sorted(prefixes)


def test_without_a_heartbeat_there_is_no_lease(store: Store) -> None:
    batch = running(store)
    assert store.requests.claim({batch.seq: 5}, "stranger", 1) == []


def test_leases_of_a_dead_dispatcher_are_taken_over(store: Store) -> None:
    batch = running(store, 10)
    store.requests.heartbeat("dead", 0, LEASE_S)
    assert len(store.requests.claim({batch.seq: 10}, "dead", 1)) == 10
    assert store.requests.heartbeat("d", 5, LEASE_S) == 0
    assert store.requests.claim({batch.seq: 10}, "d", 5) == []
    assert store.requests.heartbeat("d", LEASE_S + 1, LEASE_S) == 10
    assert len(store.requests.claim({batch.seq: 10}, "d", 12)) == 10


def test_the_first_result_is_the_result(store: Store) -> None:
    batch = running(store, 2)
    store.requests.claim({batch.seq: 2}, "d", 1)
    assert store.requests.record([good(batch, 1, "1"), good(batch, 1, "2")]) == {(batch.seq, 1)}
    assert store.requests.record([good(batch, 1, "3")]) == set()
    (first, _) = store.requests.outcomes(batch.seq)
    assert first.body == b"1"
    (work,) = store.requests.backlog()
    assert (work.pending, work.leased) == (0, 1)


def test_a_taken_over_line_has_one_result_whoever_is_first(store: Store) -> None:
    batch = running(store, 1)
    store.requests.heartbeat("slow", 0, LEASE_S)
    store.requests.claim({batch.seq: 1}, "slow", 1)
    store.requests.heartbeat("d", LEASE_S + 1, LEASE_S)
    store.requests.claim({batch.seq: 1}, "d", 12)
    assert store.requests.record([good(batch, 1, "1")])
    assert not store.requests.record([good(batch, 1, "2")])
    store.requests.put_back([PutBack(batch.seq, 1, 0, False)], "slow")
    assert store.requests.claim({batch.seq: 1}, "d", 13) == []


def test_a_line_put_back_waits_and_remembers_its_tries(store: Store) -> None:
    batch = running(store, 1)
    store.requests.claim({batch.seq: 1}, "d", 1)
    store.requests.put_back([PutBack(batch.seq, 1, 50.0, True)], "d")
    assert store.requests.claim({batch.seq: 1}, "d", 49) == []
    (line,) = store.requests.claim({batch.seq: 1}, "d", 50)
    assert line.tries == 1


def test_an_orderly_stop_gives_everything_back(store: Store) -> None:
    batch = running(store, 5)
    store.requests.claim({batch.seq: 5}, "d", 1)
    store.requests.leave("d")
    store.requests.heartbeat("e", 2, LEASE_S)
    assert len(store.requests.claim({batch.seq: 5}, "e", 2)) == 5


def test_a_closed_batch_takes_no_results(store: Store) -> None:
    batch = running(store, 2)
    store.requests.claim({batch.seq: 2}, "d", 1)
    assert store.batches.settle(90_000, 0) == 1
    assert store.requests.record([good(batch, 1)]) == set()
    assert store.requests.claim({batch.seq: 2}, "d", 90_001) == []
    ending = store.batches.take_up("d", ENDS)
    assert ending is not None and ending.outcome is BatchStatus.EXPIRED


def test_a_batch_is_worked_on_by_one_dispatcher_until_it_dies(store: Store) -> None:
    store.requests.heartbeat("d", 0, LEASE_S)
    store.batches.create("b", "o", "/v1/completions", "f", "24h", 86_400, None, None, 0)
    assert store.batches.take_up("d", VALIDATES) is not None
    assert store.batches.take_up("other", VALIDATES) is None
    store.requests.heartbeat("other", LEASE_S + 1, LEASE_S)
    batch = store.batches.take_up("other", VALIDATES)
    assert batch is not None
    assert not store.requests.load(batch.seq, "d", [NewRequest(1, "c", 0, 1, "", 1)])
    assert not store.batches.begin(batch.seq, "d", "m", 1, 1, 20)


def test_files_and_last_state_appear_together_and_once(store: Store) -> None:
    batch = running(store, 1)
    store.requests.claim({batch.seq: 1}, "d", 1)
    store.requests.record([good(batch, 1)])
    store.batches.settle(2, 0)
    ending = store.batches.take_up("d", ENDS)
    assert ending is not None
    file = FileRecord("file-out", 0, "o", "out", "batch_output", 1, 2, None)
    assert not store.batches.finish(ending, "somebody else", file, None, 1, 0, 3)
    assert store.files.get("o", "file-out", 3) is None
    assert store.batches.finish(ending, "d", file, None, 1, 0, 3)
    assert not store.batches.finish(ending, "d", file, None, 1, 0, 3)
    done = store.batches.get("o", "batch-o")
    assert done is not None and done.status is BatchStatus.COMPLETED and done.output_file_id == "file-out"


def test_a_deleted_file_is_kept_while_a_live_batch_reads_it(store: Store) -> None:
    batch = running(store, 1)
    assert store.files.delete("o", "file-o", 5)
    assert store.files.unreferenced(6) == []
    store.batches.settle(90_000, 0)
    ending = store.batches.take_up("d", ENDS)
    assert ending is not None and store.batches.finish(ending, "d", None, None, 0, 1, 90_001)
    assert store.files.unreferenced(90_002) == ["file-o"]
    assert batch.seq == ending.seq


def test_everything_survives_a_new_connection(store: Store, store_url: str) -> None:
    batch = running(store, 3)
    store.requests.claim({batch.seq: 3}, "d", 1)
    store.requests.record([good(batch, 2)])
    again = Store(store_url)
    outcomes = {outcome.line: outcome.status for outcome in again.requests.outcomes(batch.seq)}
    assert outcomes == {1: None, 2: 200, 3: None}
    again.close()
