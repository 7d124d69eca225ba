"""A benchmark takes what a spawned process has sent, and does not wait if the process stalls."""

import time
from collections import Counter
from multiprocessing.connection import Connection

from benchmarks.harness.processes import arrived, spawned
from benchmarks.tenants.hostile import long_text


def count_and_stall(pipe: Connection) -> None:
    for _ in range(2):
        pipe.send(Counter({"flood 200": 3}))
    time.sleep(3.0)


def test_counts_that_a_process_sent_before_it_stalled_are_returned_immediately() -> None:
    with spawned(count_and_stall) as pipe:
        assert pipe.poll(30.0)
        time.sleep(0.5)
        began = time.monotonic()
        assert arrived(pipe) == {"flood 200": 6}
        assert arrived(pipe) == {}
        assert time.monotonic() - began < 1.0


def count_and_end(pipe: Connection) -> None:
    pipe.send(Counter({"flood 200": 3}))


def test_counts_of_a_process_that_has_ended_are_returned() -> None:
    with spawned(count_and_end) as pipe:
        assert pipe.poll(30.0)
        time.sleep(1.0)
        assert arrived(pipe) == {"flood 200": 3}


def test_long_texts_of_two_streams_begin_differently() -> None:
    first, second = (long_text(name, 250_000) for name in ("a", "b"))
    assert len(first) == len(second) == 250_000
    assert first[:20] != second[:20]
    assert long_text("a", 30) == first[:30]
