"""Progress for a person who waits: a line when something changes, with the time since the start."""

import time


class Progress:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", flush=True)
