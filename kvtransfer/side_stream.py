"""Side streams: copies between accelerator and host, launched by our threads beside the model's kernels."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Launched:
    """Handle with which a caller waits for the work launched in one `launched_here` block."""

    def __init__(self) -> None:
        self.event: Any = None

    def wait(self) -> None:
        """Sleep until the work is done. On the CPU it is done already."""
        if self.event is not None:
            self.event.synchronize()


class SideStream:
    """Stream that runs copies in the order in which threads launch them.

    `cuda` is torch's module, or None on the CPU, where a call returns when its work is done.
    """

    def __init__(self, cuda: Any | None) -> None:
        self._cuda = cuda
        self._stream: Any = cuda.Stream() if cuda is not None else None
        self._device: Any = cuda.current_device() if cuda is not None else None
        self._marked: Any = None
        self._lock = threading.Lock()

    def mark(self) -> None:
        """Make work launched with `after_mark` wait for everything that the calling thread has launched.

        The thread that launches steps calls this when it gets an order. The order's blocks may have belonged
        to another request whose last kernels still run: an aborted iteration leaves kernels of a few layers.
        """
        self._marked = self.launched()

    def adopt_thread(self) -> None:
        """Set the calling thread's device to the stream's, before it launches or waits.

        A new thread has device 0, and would create a CUDA context there on a worker of another device.
        """
        if self._cuda is not None:
            self._cuda.set_device(self._device)

    def launched(self) -> Any:
        """Return an event that follows everything on the calling thread's stream, or None on the CPU."""
        return self._recorded(self._cuda.current_stream()) if self._cuda is not None else None

    @contextmanager
    def launching(self, after_mark: bool = False) -> Iterator[None]:
        """Run the body, which launches work on the stream, then sleep until that work is done.

        While this thread sleeps, other threads may launch.
        """
        with self.launched_here(after_mark) as launched:
            yield
        launched.wait()

    @contextmanager
    def launched_here(self, after_mark: bool = False) -> Iterator[Launched]:
        """Run the body, which launches work on the stream; yield a handle to wait for that work later.

        If the body raises, this waits for the launched work before it passes the exception on, because the
        caller may reuse the memory.
        """
        launched = Launched()
        if self._cuda is None:
            with self._lock:
                yield launched
            return
        self.adopt_thread()
        with self._lock, self._cuda.stream(self._stream):
            if after_mark and self._marked is not None:
                self._stream.wait_event(self._marked)
            try:
                yield launched
                launched.event = self._recorded(self._stream)
            except BaseException:
                self._stream.synchronize()
                raise

    def _recorded(self, stream: Any) -> Any:
        assert self._cuda is not None
        event = self._cuda.Event(blocking=True)
        event.record(stream)
        return event


def cuda_of(tensor: Any) -> Any | None:
    """Return `torch.cuda` for a tensor on a GPU, otherwise None."""
    import torch

    return torch.cuda if tensor.is_cuda else None
