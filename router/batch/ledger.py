"""Makes the ends of tries durable, many at once: what arrives while one group commits forms the next."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from sqlalchemy.exc import SQLAlchemyError

from router.batch.metrics import COMMIT_SECONDS, DUPLICATES, HARVESTED, STEP_ERRORS
from router.batch.records import Result
from router.batch.store.requests import PutBack
from router.batch.store.store import Store

log = logging.getLogger("conserve.router.batch.ledger")

_RETRY_S = 1.0


class Ledger:
    def __init__(
        self,
        store: Store,
        dispatcher: str,
        in_thread: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._in_thread = in_thread
        self._results: list[Result] = []
        self._put_backs: list[PutBack] = []
        self._work = asyncio.Event()

    def result(self, result: Result) -> None:
        self._results.append(result)
        self._work.set()

    def put_back(self, line: PutBack) -> None:
        self._put_backs.append(line)
        self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            try:
                await self.flush()
            except SQLAlchemyError as error:
                STEP_ERRORS.labels("store").inc()
                log.warning(
                    "results not written, trying again wait_s=%.0f error=%s", _RETRY_S, type(error).__name__
                )
                await asyncio.sleep(_RETRY_S)

    async def flush(self) -> None:
        """Nothing is dropped before it is durable."""
        results, put_backs = self._results[:], self._put_backs[:]
        await self._in_thread(lambda: self._write(results, put_backs))
        del self._results[: len(results)]
        del self._put_backs[: len(put_backs)]
        if not self._results and not self._put_backs:
            self._work.clear()

    def _write(self, results: list[Result], put_backs: list[PutBack]) -> None:
        if results:
            started = time.perf_counter()
            accepted = self._store.requests.record(results)
            COMMIT_SECONDS.observe(time.perf_counter() - started)
            DUPLICATES.inc(len(results) - len(accepted))
            _count(result for result in results if (result.batch, result.line) in accepted)
        if put_backs:
            self._store.requests.put_back(put_backs, self._dispatcher)


def _count(results: Iterable[Result]) -> None:
    prompt = cached = output = 0
    for result in results:
        if result.succeeded:
            prompt += result.usage.input_tokens - result.usage.cached_tokens
            cached += result.usage.cached_tokens
            output += result.usage.output_tokens
    for kind, tokens in (("prompt", prompt), ("cached", cached), ("output", output)):
        HARVESTED.labels(kind).inc(tokens)
