"""Prefetching of parked conversations: their KV is on the accelerator before their tool call returns.

A prefetch is a command to the engine, through the directory and the engine's keeper. The engine loads the
blocks from its host, and the next turn finds them. Only conversations that the directory knows as parked are
prefetched. A turn that arrives while its engine is loading waits there for the rest of the load.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from placement.prefetch_rules import REMEMBERED_WAITS, PrefetchRules, PrefetchTime, may_prefetch
from router import metrics
from router.directory.api.cache import Known
from router.directory.api.client import DirectoryClient
from router.errors import DirectoryUnavailable

log = logging.getLogger("conserve.router.prefetch")

_LOOK_EVERY_S = 0.25


class Prefetcher:
    """Plans a prefetch when a turn calls a tool, and requests it before the tool's expected return."""

    def __init__(
        self,
        rules: PrefetchRules,
        directory: DirectoryClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._directory, self._clock = rules, directory, clock
        self._planned: dict[str, asyncio.Task[None]] = {}  # by conversation

    def tool_called(self, away_s: float | None, known: Known) -> None:
        """Plan a prefetch after a turn called a tool, which takes `away_s` according to the client."""
        known.tool_called_at = self._clock()
        planned = self._rules.prefetch(away_s, known.tool_waits)
        if planned is not None:
            self._cancel(known.key)
            self._planned[known.key] = asyncio.create_task(self._prefetch(known, planned))

    def turn_arrived(self, known: Known) -> None:
        """Cancel the prefetch that was planned for a conversation, because its next turn has arrived."""
        self._cancel(known.key)
        if known.tool_called_at is not None:
            wait_s = self._clock() - known.tool_called_at
            known.tool_waits = (*known.tool_waits, wait_s)[-REMEMBERED_WAITS:]
            known.tool_called_at = None

    def close(self) -> None:
        """Cancel every planned prefetch."""
        for key in tuple(self._planned):
            self._cancel(key)

    def _cancel(self, key: str) -> None:
        if (task := self._planned.pop(key, None)) is not None:
            task.cancel()

    async def _prefetch(self, known: Known, planned: PrefetchTime) -> None:
        outcome = "returned"
        try:
            await asyncio.sleep(planned.after_s)
            async with asyncio.timeout(self._rules.patience_s):
                while not self._may_load(known):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)
            outcome = await self._directory.prefetch(known.key, planned.due_in_s)
        except TimeoutError:
            outcome = "busy"
        except DirectoryUnavailable as error:
            log.warning("prefetch failed conversation=%s engine=%s reason=%s", known.key, known.engine, error)
            outcome = "failed"
        finally:
            metrics.RESTORES_AHEAD.labels(outcome).inc()
            if self._planned.get(known.key) is asyncio.current_task():
                del self._planned[known.key]

    def _may_load(self, known: Known) -> bool:
        state = self._directory.engines.state(known.engine)
        return state is not None and may_prefetch(state, known.context_tokens)
