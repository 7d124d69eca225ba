"""A rest is proportional to processor time, not to elapsed time."""

import time

from kvtransfer.checkpoint.copier import CopyThrottle


def test_a_piece_of_copying_is_followed_by_a_rest() -> None:
    pace = CopyThrottle(1e-4, 1.0)
    pace.begin()
    began = time.thread_time()
    while time.thread_time() < began + 0.01:
        pass
    pace.end(0.0)
    assert 50 < pace.left_s() < 1000  # 100 s, less what a busy machine takes meanwhile


def test_waiting_work_shortens_the_rest() -> None:
    pace = CopyThrottle(1e-4, patience_s=0.25)
    pace.begin()
    began = time.thread_time()
    while time.thread_time() < began + 0.01:
        pass
    pace.end(waited_s=25.0)  # a hundred times its patience
    assert 0.5 < pace.left_s() < 10  # 1 s, less what a busy machine takes meanwhile
    pace.begin()
    pace.end(waited_s=3600.0)
    assert pace.left_s() <= 0


def test_time_that_a_piece_spends_waiting_needs_no_rest() -> None:
    pace = CopyThrottle(0.1, 1.0)
    pace.begin()
    time.sleep(0.5)
    pace.end(0.0)
    assert pace.left_s() < 1


def test_a_copier_that_may_use_a_whole_core_does_not_rest() -> None:
    pace = CopyThrottle(1.0, 1.0)
    assert pace.left_s() <= 0
    pace.begin()
    sum(range(10_000))
    pace.end(0.0)
    assert pace.left_s() <= 0
