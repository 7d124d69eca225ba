"""How much of a core background copies take from the model."""

import time


class Pace:
    """A rest after each piece of work, in proportion to the processor time that it took.

    Not to the time that passed: work that others hold up would rest for it too, and never end. The longer
    work has waited, the shorter the rests: after `patience_s` the share of a core is twice `share`, after
    twice that three times. So the share becomes what the load needs, and the wait stays in bounds.
    """

    def __init__(self, share: float, patience_s: float) -> None:
        self._share = share
        self._patience_s = patience_s
        self._until = 0.0
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.thread_time()

    def end(self, waited_s: float) -> None:
        """`waited_s`: how long the oldest work that is not done has waited."""
        share = min(1.0, self._share * (1 + waited_s / self._patience_s))
        self._until = time.monotonic() + (time.thread_time() - self._began) * (1 / share - 1)

    def left_s(self) -> float:
        return self._until - time.monotonic()
