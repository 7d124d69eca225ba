"""A side stream: copies between accelerator and host beside the model's kernels, launched by our threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Launched:
    """What was launched within one `launched_here`; on the CPU it is done."""

    def __init__(self) -> None:
        self.event: Any = None

    def wait(self) -> None:
        """The thread sleeps until it is done."""
        if self.event is not None:
            self.event.synchronize()


class SideStream:
    """In the order in which they are launched, whichever threads launch them.

    `cuda` is torch's module, or None on the CPU, where all is done when it has been called.
    """

    def __init__(self, cuda: Any | None) -> None:
        self._cuda = cuda
        self._stream: Any = cuda.Stream() if cuda is not None else None
        self._device: Any = cuda.current_device() if cuda is not None else None
        self._marked: Any = None
        self._lock = threading.Lock()

    def mark(self) -> None:
        """What was launched up to now comes before what is launched here `after_mark`.

        Called by the thread that launches steps, once an order is there: blocks that it names may have been
        another request's, whose last kernels still run. That of a step is waited for before its results are
        used; an iteration that was aborted leaves kernels of a few layers behind.
        """
        self._marked = self.launched()

    def adopt_thread(self) -> None:
        """Makes the stream's device that of the calling thread, before it launches or waits.

        A new thread has device 0: on a worker of another device it would leave a CUDA context there.
        """
        if self._cuda is not None:
            self._cuda.set_device(self._device)

    def launched(self) -> Any:
        """An event of what the thread's own stream has up to now; None: it is done."""
        return self._recorded(self._cuda.current_stream()) if self._cuda is not None else None

    @contextmanager
    def launching(self, after_mark: bool = False) -> Iterator[None]:
        """What is launched within is done on return: the thread sleeps, and others may launch meanwhile."""
        with self.launched_here(after_mark) as launched:
            yield
        launched.wait()

    @contextmanager
    def launched_here(self, after_mark: bool = False) -> Iterator[Launched]:
        """What is launched within can be waited for from the end on. When it raises, what it had launched is
        done: nobody waits for that, and its memory may be another's next."""
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
    import torch

    return torch.cuda if tensor.is_cuda else None
