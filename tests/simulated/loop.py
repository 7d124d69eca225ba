"""Event loop with virtual time, on which simulated processes take turns in a seeded order.

Each process has a queue of its own, which is served in order, as asyncio does it. The seed decides which
process is next, how long steps and calls of threads take, and how long processes stand still. A crash
is the end of a queue: no further step of the process runs, not even a `finally`.
"""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulated.disk import Disk
    from tests.simulated.network import Network

STEP_S = 20e-6  # longest time of one step
_CURRENT: contextvars.ContextVar["SimulatedProcess"] = contextvars.ContextVar("process")


_numbers = itertools.count()


def number_of(one: Any) -> int:
    """Return an object's serial number, which as its hash gives sets the same order in every run."""
    if (number := getattr(one, "_number", None)) is None:
        number = one._number = next(_numbers)
    return int(number)


class NumberedTask(asyncio.Task):  # type: ignore[type-arg]
    __hash__ = number_of


class NumberedFuture(asyncio.Future):  # type: ignore[type-arg]
    __hash__ = number_of


class SimulatedProcess:
    """One life of a simulated process: a queue of steps, and everything that ends with it."""

    def __init__(self, loop: "VirtualLoop", name: str, host: str, disk: "Disk | None" = None) -> None:
        self.loop, self.name, self.host, self.disk = loop, name, host, disk
        self.alive = True
        self.steps = 0
        self.crashes_at: int | None = None  # number of the step at which it crashes
        self.frozen_until = 0.0
        self.frozen_s = 0.0  # in total
        self.queue: deque[asyncio.Handle] = deque()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.threads: dict[int, float] = {}  # executor -> when its thread is free
        self.on_end: list[Callable[[], None]] = []
        self.context = contextvars.copy_context()
        self.context.run(_CURRENT.set, self)
        self._label = name.encode()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in this simulated process, until the process crashes."""
        return self.loop.create_task(work, context=self.context)

    def crash(self) -> None:
        """End the process immediately, as `kill -9` does."""
        if self.alive:
            self.alive = False
            # Freeing a coroutine would run its `finally`.
            self.loop.graveyard.append((list(self.tasks), list(self.queue)))
            self.queue.clear()
            for callback in self.on_end:
                callback()

    def freeze(self, seconds: float) -> None:
        """Stop the process for `seconds`, as a full garbage collection or SIGSTOP does."""
        now = self.loop.time()
        until = max(self.frozen_until, now + seconds)
        self.frozen_s += until - max(self.frozen_until, now)
        self.frozen_until = until


def current() -> SimulatedProcess:
    """Return the process whose step is running."""
    return _CURRENT.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop of all processes of one world."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.network: Network  # set by the world
        self.graveyard: list[object] = []
        self.steps = 0
        self.trace = 0  # running checksum of everything that happened
        self.on_step: Callable[[SimulatedProcess], None] = lambda process: None
        self._now = 0.0
        self._runnable: dict[SimulatedProcess, None] = {}
        self._order = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, timer))
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # nothing here has threads

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled timer in place; it is skipped when it is due."""

    def _enqueue(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_CURRENT)  # type: ignore[attr-defined]
        if process is not None and process.alive:
            process.queue.append(handle)
            self._runnable[process] = None

    def _run_once(self) -> None:
        """Run one step of one process."""
        timers, runnable = self._timers, self._runnable
        while True:
            now = self._now
            while timers and timers[0][0] <= now:
                timer = heapq.heappop(timers)[2]
                if not timer._cancelled:  # type: ignore[attr-defined]
                    self._enqueue(timer)
            if ready := [one for one in runnable if one.frozen_until <= now]:
                break
            wakes = [one.frozen_until for one in runnable]
            if timers:
                wakes.append(timers[0][0])
            self._now = max(now, min(wakes))
        process = ready[int(self.random.random() * len(ready))]
        queue = process.queue
        while queue:
            handle = queue.popleft()
            if not handle._cancelled:  # type: ignore[attr-defined]
                self._step(process, handle)
                break
        if not queue:
            self._runnable.pop(process, None)

    def _step(self, process: SimulatedProcess, handle: asyncio.Handle) -> None:
        self._now += self.random.random() * STEP_S
        self.steps += 1
        process.steps += 1
        self.trace = zlib.crc32(process._label, zlib.crc32(struct.pack("d", self._now), self.trace))
        handle._run()
        self.on_step(process)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = NumberedTask(work, loop=loop, context=context)
        process = (context or contextvars.copy_context()).get(_CURRENT)
        if process is not None:
            process.tasks.add(task)
        return task

    def create_future(self) -> "asyncio.Future[Any]":
        return NumberedFuture(loop=self)

    # Threads

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Run the work of a thread in one step: after a random delay, with its result after a further delay.

        Work of one executor runs in order. A crash may come before the work, or between work and result.
        """
        process, done = current(), self.create_future()
        lane = id(executor)
        free_at = process.threads.get(lane, 0.0) if executor is not None else 0.0
        slow_s = process.disk.slow_s if process.disk is not None else 0.0
        begins = max(self._now, free_at) + self.random.expovariate(2000.0) + slow_s
        ends = begins + self.random.expovariate(1000.0)
        process.threads[lane] = ends

        def settle(result: Any, error: BaseException | None) -> None:
            if not done.done():
                if error is not None:
                    done.set_exception(error)
                else:
                    done.set_result(result)

        def run() -> None:
            result, error = None, None
            try:
                result = work(*args)
            except Exception as wrong:  # noqa: BLE001  whoever awaits the result gets it
                error = wrong
            self.call_at(max(self._now, ends), settle, result, error)

        self.call_at(begins, run)
        return done

    # Network

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.network.listen(current(), factory, host, port)

    async def create_connection(
        self, factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        if sock is not None:  # aiohttp connects a socket first: `network.Unconnected`
            host, port = sock.address
        return await self.network.connect(current(), factory, host, int(port))

    async def create_unix_server(self, factory: Any, path: Any = None, **_: Any) -> Any:
        Path(path).touch()  # noqa: ASYNC240  takes no virtual time
        return self.network.listen(current(), factory, current().host, _port_of(path))

    async def create_unix_connection(self, factory: Any, path: Any = None, **_: Any) -> Any:
        return await self.network.connect(current(), factory, current().host, _port_of(path))

    def add_signal_handler(self, *_: Any) -> None:
        """Ignore signals: a process ends by `SimulatedProcess.crash` or is cancelled."""

    def _process_events(self, event_list: Any) -> None:
        raise NotImplementedError("there are no file descriptors here")

    def _write_to_self(self) -> None:
        pass

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        with contextlib.suppress(LookupError):
            self.on_fault(current(), context)

    on_fault: Callable[[SimulatedProcess, dict[str, Any]], None] = staticmethod(lambda process, context: None)


def _port_of(path: object) -> int:
    """Return a port number that stands for the Unix socket at `path`."""
    return 1_000_000 + zlib.crc32(str(path).encode())
