"""Stand-in for CUDA streams and events that runs all work as late as permitted.

Work launched on a stream, torch's copies within `LateCuda.stream` included, runs only when something waits
for it. Work that no event orders therefore runs in the wrong order, and memory that is reused too early gets
the wrong bytes.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LAUNCHES = {torch.Tensor.copy_, torch.Tensor.index_copy_, torch.index_select}  # in place, or with `out`


class LateStream:
    def __init__(self) -> None:
        self.launched: list[Callable[[], None]] = []
        self.done = 0
        self._lock = threading.RLock()  # held by the thread that runs the work

    def launch(self, work: Callable[[], Any]) -> None:
        self.launched.append(work)

    def finish(self, end: int | None = None) -> None:
        end = len(self.launched) if end is None else end
        assert end <= len(self.launched), "waits for work that was never launched"
        with self._lock:
            while self.done < end:
                work = self.launched[self.done]
                self.done += 1
                work()

    def wait_event(self, event: "LateEvent") -> None:
        self.launch(event.synchronize)

    def synchronize(self) -> None:
        self.finish()


class LateEvent:
    """Event with CUDA's semantics: complete until it is first recorded; only the last record counts."""

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


_at_work = threading.local()  # set while a thread runs launched work: its torch calls run at once


class _Launching(TorchFunctionMode):
    """Mode in which the torch calls of one thread are launched on a stream instead of run."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LAUNCHES or getattr(_at_work, "now", False):
            return func(*args, **kwargs)

        def later() -> None:
            _at_work.now = True
            try:
                func(*args, **kwargs)
            finally:
                _at_work.now = False

        self._stream.launch(later)
        return kwargs.get("out", args[0])


class LateCuda:
    """Stands in for the parts of `torch.cuda` that the product uses."""

    def __init__(self) -> None:
        self.compute = LateStream()
        self.Stream = LateStream
        self._by_thread = threading.local()

    def current_device(self) -> int:
        return getattr(self._by_thread, "device", 0)

    def set_device(self, device: int) -> None:
        self._by_thread.device = device

    def Event(self, blocking: bool = False) -> LateEvent:
        return LateEvent(self.compute)

    def current_stream(self) -> LateStream:
        return self.compute

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        with _Launching(stream):
            yield
