"""A store on SQLite or PostgreSQL keeps all that it acknowledged, and has only one writer."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Executable, Row, create_engine, text, update

from router.batch.store.database import VERSION, StoreTakenOver, stores
from router.batch.store.records import BatchStatus, FileRecord, NewBatch, NewRequest, Result
from router.batch.store.request_table import PutBack
from router.batch.store.store import ENDS, VALIDATES, Store
from router.errors import GatewayConfigError
from tests.router.test_clocks import MachineClocks


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    made = Store(store_url)
    made.take_over()
    yield made
    made.close()


def running(store: Store, lines: int = 10, owner: str = "o") -> Row[Any]:
    """Create a batch that is in progress with `lines` lines, and return it."""
    store.files.add(FileRecord(f"file-{owner}", owner, "f", "batch", 1, 0, None))
    wanted = NewBatch(f"file-{owner}", "/v1/completions", "24h", 86_400)
    store.batches.create(f"batch-{owner}", owner, wanted, 0)
    batch = store.batches.first(VALIDATES)
    assert batch is not None
    rows = [NewRequest(n, f"c{n}", 0, 1, f"{n % 3:024}", 10) for n in range(1, lines + 1)]
    assert store.requests.load(batch.seq, rows) and store.requests.enqueue(batch.seq)
    assert store.batches.begin(batch.seq, "m", lines, 10 * lines, 1)
    return batch


def good(batch: Row[Any], line: int, text: str = "1") -> Result:
    return Result(batch.seq, line, 200, text.encode(), "r")


def test_a_leased_line_is_not_leased_again(store: Store) -> None:
    batch = running(store, 200)
    claimed: dict[int, list[int]] = {thread: [] for thread in range(4)}

    def work(thread: int) -> None:
        for _ in range(5):
            claimed[thread] += [line.line for line in store.requests.claim({batch.seq: 10}, 1)]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in claimed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = sorted(line for lines in claimed.values() for line in lines)
    assert everything == list(range(1, 201))


def test_lines_with_a_common_prefix_are_leased_together(store: Store) -> None:
    batch = running(store, 9)
    prefixes = [line.prefix for line in store.requests.claim({batch.seq: 9}, 1)]
    assert prefixes == sorted(prefixes)


def test_a_process_cannot_write_after_another_took_over_the_store(store: Store, store_url: str) -> None:
    batch = running(store, 10)
    assert len(store.requests.claim({batch.seq: 4}, 1)) == 4
    store.requests.record([good(batch, 1)])
    later = Store(store_url)
    assert later.take_over() == 3  # lines in flight without a result are queued again
    former: tuple[Callable[[], object], ...] = (
        lambda: store.requests.claim({batch.seq: 1}, 2),
        lambda: store.requests.record([good(batch, 2)]),
        lambda: store.requests.put_back([PutBack(batch.seq, 2, 0, False)]),
        lambda: store.batches.settle(90_000, 0),
        lambda: store.batches.cancel("o", "batch-o", 2),
        lambda: store.files.delete("o", "file-o", 2),
    )
    for write in former:
        with pytest.raises(StoreTakenOver):
            write()
    assert store.batches.get("o", "batch-o") is not None  # a superseded process may still read
    assert len(later.requests.claim({batch.seq: 10}, 2)) == 9
    later.close()


def test_only_the_first_result_of_a_line_counts(store: Store) -> None:
    batch = running(store, 2)
    store.requests.claim({batch.seq: 2}, 1)
    assert store.requests.record([good(batch, 1, "1"), good(batch, 1, "2")]) == {(batch.seq, 1)}
    assert store.requests.record([good(batch, 1, "3")]) == set()
    (first, _) = store.requests.outcomes(batch.seq)
    assert first.body == b"1"
    (work,) = store.requests.backlog()
    assert (work.pending, work.leased) == (0, 1)


def test_a_line_that_is_put_back_waits_and_keeps_its_number_of_tries(store: Store) -> None:
    batch = running(store, 1)
    store.requests.claim({batch.seq: 1}, 1)
    store.requests.put_back([PutBack(batch.seq, 1, 50.0, True)])
    assert store.requests.claim({batch.seq: 1}, 49) == []
    (line,) = store.requests.claim({batch.seq: 1}, 50)
    assert line.tries == 1


def test_a_closed_batch_accepts_no_results(store: Store) -> None:
    batch = running(store, 2)
    store.requests.claim({batch.seq: 2}, 1)
    assert store.batches.settle(90_000, 0) == 1
    assert store.requests.record([good(batch, 1)]) == set()
    assert store.requests.claim({batch.seq: 2}, 90_001) == []
    ending = store.batches.first(ENDS)
    assert ending is not None and ending.outcome == BatchStatus.EXPIRED


def test_a_batch_cancelled_during_validation_accepts_no_more_lines(store: Store) -> None:
    store.batches.create("b", "o", NewBatch("f", "/v1/completions", "24h", 86_400), 0)
    batch = store.batches.first(VALIDATES)
    assert batch is not None and store.requests.load(batch.seq, [NewRequest(1, "c", 0, 1, "", 1)])
    store.batches.cancel("o", "b", 1)
    assert not store.requests.load(batch.seq, [NewRequest(2, "d", 0, 1, "", 1)])
    assert not store.batches.begin(batch.seq, "m", 2, 2, 2)
    assert not store.batches.fail(batch.seq, [], 2)


def test_a_batch_is_finished_once_together_with_its_output_file(store: Store) -> None:
    batch = running(store, 1)
    store.requests.claim({batch.seq: 1}, 1)
    store.requests.record([good(batch, 1)])
    store.batches.settle(2, 0)
    ending = store.batches.first(ENDS)
    assert ending is not None
    file = FileRecord("file-out", "o", "out", "batch_output", 1, 2, None)
    assert store.files.get("o", "file-out", 3) is None
    assert store.batches.finish(ending, file, None, 1, 0, 3)
    assert not store.batches.finish(ending, file, None, 1, 0, 3)
    assert store.batches.ended_with_lines() == [batch.seq]
    store.requests.clear(batch.seq)
    assert store.batches.ended_with_lines() == []
    done = store.batches.get("o", "batch-o")
    assert done is not None and done.status == BatchStatus.COMPLETED and done.output_file_id == "file-out"


def test_a_deleted_file_is_kept_while_a_live_batch_reads_it(store: Store) -> None:
    batch = running(store, 1)
    assert store.files.delete("o", "file-o", 5)
    assert store.files.unreferenced(6) == []
    store.batches.settle(90_000, 0)
    ending = store.batches.first(ENDS)
    assert ending is not None and store.batches.finish(ending, None, None, 0, 1, 90_001)
    assert store.files.unreferenced(90_002) == ["file-o"]
    assert batch.seq == ending.seq


def test_lines_and_results_are_still_there_after_the_store_is_reopened(store: Store, store_url: str) -> None:
    batch = running(store, 3)
    store.requests.claim({batch.seq: 3}, 1)
    store.requests.record([good(batch, 2)])
    again = Store(store_url)
    outcomes = {outcome.line: outcome.status for outcome in again.requests.outcomes(batch.seq)}
    assert outcomes == {1: None, 2: 200, 3: None}
    again.close()


@pytest.mark.parametrize(
    ("change", "version"),
    [(update(stores).values(version=VERSION + 1), VERSION + 1), (text("DROP TABLE batch_store"), 0)],
    ids=["newer", "from before versions were recorded"],
)
def test_a_store_of_another_version_is_refused(store_url: str, change: Executable, version: int) -> None:
    former = Store(store_url)
    former.take_over()
    former.close()
    engine = create_engine(store_url)
    with engine.begin() as connection:
        connection.execute(change)
    engine.dispose()
    store = Store(store_url)
    with pytest.raises(GatewayConfigError, match=f"has version {version}, and .* reads only {VERSION}"):
        store.take_over()
    store.close()


def test_the_clock_of_a_new_process_is_not_behind_the_newest_stored_time(store_url: str) -> None:
    machine = MachineClocks()
    first = Store(store_url)
    clock = machine.clock()
    first.take_over(clock)
    began = int(clock())
    first.files.add(FileRecord("file-1", "o", "f", "batch", 1, began, began + 600))
    first.close()
    machine.system -= 3600
    later, clock = Store(store_url), machine.clock()
    later.take_over(clock)
    assert clock() == began
    later.close()


def test_only_batches_that_ended_are_deleted_after_their_retention(store: Store) -> None:
    ended, live = running(store, 3, "a"), running(store, 3, "b")
    claimed = store.requests.claim({ended.seq: 3}, 1)
    store.requests.record([good(ended, line.line) for line in claimed])
    store.batches.settle(2.0, 0)
    finishing = store.batches.first(ENDS)
    assert finishing is not None and store.batches.finish(finishing, None, None, 3, 0, 3.0)
    assert store.batches.forget(1000.0) == 0  # its lines still exist
    store.requests.clear(ended.seq)
    assert store.batches.forget(-1.0) == 0  # its retention is not over yet
    assert store.batches.forget(1000.0) == 1
    assert store.batches.get("a", "batch-a") is None
    assert store.batches.get("b", "batch-b") is not None and live.seq != ended.seq
