"""An accelerator that does what it is told as late as it may: streams and events, without one.

What is launched on a stream waits there until something waits for it. What a side stream's thread calls is
done at once. So whatever is not ordered by an event happens in the wrong order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class LateStream:
    def __init__(self) -> None:
        self.launched: list[Callable[[], None]] = []
        self.done = 0

    def launch(self, work: Callable[[], None]) -> None:
        self.launched.append(work)

    def finish(self, end: int | None = None) -> None:
        end = len(self.launched) if end is None else end
        assert end <= len(self.launched), "waits for what nobody has launched"
        while self.done < end:
            work = self.launched[self.done]
            self.done += 1
            work()

    def wait_event(self, event: "LateEvent") -> None:
        event.synchronize()

    def synchronize(self) -> None:
        self.finish()


class LateEvent:
    """As CUDA's: one that was never recorded is complete, and the last record counts."""

    def __init__(self, stream: LateStream) -> None:
        self._usual = self._stream = stream
        self._at = 0

    def record(self, stream: LateStream | None = None) -> None:
        self._stream = stream or self._usual
        self._at = len(self._stream.launched)

    def synchronize(self) -> None:
        self._stream.finish(self._at)

    @property
    def complete(self) -> bool:
        return self._stream.done >= self._at


class LateCuda:
    """What is used of `torch.cuda`."""

    def __init__(self) -> None:
        self.compute = LateStream()
        self.Stream = LateStream

    def Event(self, blocking: bool = False) -> LateEvent:
        return LateEvent(self.compute)

    def current_stream(self) -> LateStream:
        return self.compute

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield
