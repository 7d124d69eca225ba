"""An actor's work: one coroutine in a thread of its own, apart from Ray's calls."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger("conserve.deploy.actor")

Result = TypeVar("Result")


class Background:
    """Runs until the actor's process ends. If the work fails, so does the process: Ray restarts the actor."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._began = threading.Event()
        threading.Thread(target=self._run, name="background", daemon=True).start()
        self._began.wait()

    def call(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def stop(self) -> None:
        """Cancel the work and wait for it; to be called through `call`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(_end_process_on_failure)
        self._began.set()
        self._loop.run_forever()


def _end_process_on_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the actor's work failed", exc_info=error)
        os._exit(70)
