"""How much of a core background copies take from the model."""

import time


class Pace:
    """A rest after each piece of work, in proportion to the processor time that it took.

    Not to the time that passed: work that others hold up would rest for it too, and never end.
    """

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._until = 0.0
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.thread_time()

    def end(self) -> None:
        self._until = time.monotonic() + (time.thread_time() - self._began) * self._rest

    def left_s(self) -> float:
        return self._until - time.monotonic()
