"""What the peer costs is counted once, under names that an engine's page has."""

from types import SimpleNamespace
from typing import Any

from workers.overload.metrics import COUNTERS
from workers.overload.plugin import OverloadWorker
from workers.overload.split import SplitTally


def test_what_is_new_is_taken_once_and_under_known_names() -> None:
    context: Any = None
    worker, tally = OverloadWorker(context, 0), SplitTally()
    assert worker.take_counts() == {}  # there is no model yet
    split: Any = SimpleNamespace(tally=tally)
    worker.split = split
    assert worker.take_counts() == {}
    tally.passes, tally.served, tally.peer_s, tally.peer_bytes = 3, 2, 0.5, 4096
    tally.idle_s, tally.served_s = 0.25, 0.75
    first = worker.take_counts()
    assert sorted(first.values()) == [0.25, 0.5, 0.75, 2, 3, 4096]
    for name in first:
        kind, _, value = name.partition(".")
        assert value in (COUNTERS[kind].values or ("",))
    tally.peer_s += 0.25
    assert worker.take_counts() == {"split_peer_seconds": 0.25}
    assert worker.take_counts() == {}
