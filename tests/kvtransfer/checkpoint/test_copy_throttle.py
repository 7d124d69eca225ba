"""The copier's rest after a copy is proportional to the copy's processor time, not to elapsed time."""

import time

from kvtransfer.checkpoint.copier import CopyThrottle


def test_the_throttle_asks_for_a_rest_after_a_copy() -> None:
    pace = CopyThrottle(1e-4, 1.0)
    pace.begin()
    began = time.thread_time()
    while time.thread_time() < began + 0.01:
        pass
    pace.end(0.0)
    assert 50 < pace.left_s() < 1000  # 100 s, less what a busy machine takes meanwhile


def test_the_rest_is_shorter_if_work_has_waited_for_long() -> None:
    pace = CopyThrottle(1e-4, patience_s=0.25)
    pace.begin()
    began = time.thread_time()
    while time.thread_time() < began + 0.01:
        pass
    pace.end(waited_s=25.0)  # a hundred times `patience_s`
    assert 0.5 < pace.left_s() < 10  # 1 s, less what a busy machine takes meanwhile
    pace.begin()
    pace.end(waited_s=3600.0)
    assert pace.left_s() <= 0


def test_time_that_a_copy_waits_without_computing_does_not_lengthen_the_rest() -> None:
    pace = CopyThrottle(0.1, 1.0)
    pace.begin()
    time.sleep(0.5)
    pace.end(0.0)
    assert pace.left_s() < 1


def test_a_throttle_that_allows_a_whole_core_asks_for_no_rest() -> None:
    pace = CopyThrottle(1.0, 1.0)
    assert pace.left_s() <= 0
    pace.begin()
    sum(range(10_000))
    pace.end(0.0)
    assert pace.left_s() <= 0
