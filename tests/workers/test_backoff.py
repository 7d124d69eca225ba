"""The wait before the next start grows with the number of failed starts in a row."""

from workers.processes import Backoff


def test_failures_are_counted_since_the_last_calm_period() -> None:
    backoff = Backoff(1.0, 8.0, calm_s=60.0)
    assert [backoff.next(0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert backoff.failures == 5
    backoff.serving(100.0)
    assert backoff.next(130.0) == 8.0 and backoff.failures == 6, "it served for less than a calm"
    backoff.serving(200.0)
    assert backoff.next(300.0) == 1.0 and backoff.failures == 1
