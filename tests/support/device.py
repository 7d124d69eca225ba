"""An accelerator that does what it is told as late as it may: streams and events, without one.

What is launched on a stream waits there until something waits for it, also torch's copies within
`LateCuda.stream`. So whatever is not ordered by an event happens in the wrong order, and memory that is used
again too early has the wrong bytes.
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
        self._lock = threading.RLock()  # who waits does what is waited for, and others wait for that

    def launch(self, work: Callable[[], Any]) -> None:
        self.launched.append(work)

    def finish(self, end: int | None = None) -> None:
        end = len(self.launched) if end is None else end
        assert end <= len(self.launched), "waits for what nobody has launched"
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


_at_work = threading.local()  # a thread does what was launched, and may itself be launching


class _Launching(TorchFunctionMode):
    """Of one thread: what it calls of torch goes to a stream."""

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
    """What is used of `torch.cuda`."""

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
