"""How long to wait before an engine is started again."""


class Backoff:
    """Doubles from `first` to `longest`; a long enough calm starts over."""

    def __init__(self, first_s: float, longest_s: float, calm_s: float) -> None:
        self._first, self._longest, self._calm = first_s, longest_s, calm_s
        self._next = first_s
        self._serving_since: float | None = None

    def serving(self, now: float) -> None:
        self._serving_since = now

    def next(self, now: float) -> float:
        if self._serving_since is not None and now - self._serving_since >= self._calm:
            self._next = self._first
        self._serving_since = None
        wait, self._next = self._next, min(self._longest, self._next * 2)
        return wait
