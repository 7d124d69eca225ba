"""Thread for a disk that may hang: calls run one after another, and no wait for one is without a limit.

It is a daemon: neither the end of the loop nor that of the process waits for a call that does not come back.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class DiskThread:
    def __init__(self, name: str, longest_s: float) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._longest_s = longest_s
        self._begun_at: float | None = None  # the call under way
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def hangs(self) -> bool:
        begun_at = self._begun_at
        return begun_at is not None and time.monotonic() - begun_at > self._longest_s

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """TimeoutError where it does not come back in time; at once where one before it has not."""
        if self.hangs:
            raise TimeoutError
        async with asyncio.timeout(self._longest_s):
            return await self.submit(function, *arguments)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> asyncio.Future[Result]:
        """One that is cancelled before its turn is not called."""
        job: Future[Result] = Future()
        self._jobs.put((job, function, arguments))
        return asyncio.wrap_future(job)

    async def close(self, last: Callable[[], None]) -> None:
        """After what was asked before, and `last`. TimeoutError where that takes too long."""
        ending = asyncio.ensure_future(self.run(last))
        await asyncio.sleep(0)  # now it is asked
        self._jobs.put(None)
        await ending

    def _serve(self) -> None:
        while (asked := self._jobs.get()) is not None:
            job, function, arguments = asked
            if job.set_running_or_notify_cancel():
                self._begun_at = time.monotonic()
                try:
                    job.set_result(function(*arguments))
                except BaseException as wrong:  # noqa: BLE001  whoever waits for it is told
                    job.set_exception(wrong)
                self._begun_at = None
            del asked, job, function, arguments  # what they hold, until the next one comes
