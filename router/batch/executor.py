"""Sends offline requests to engines and says what came of each."""

import asyncio
import logging
from collections.abc import Callable

from placement.engines import EngineInfo, EngineState
from router.batch.answers import answered, engine_body, failed
from router.batch.config import BatchLimits, DispatchSettings
from router.batch.flights import Flights
from router.batch.ledger import Ledger
from router.batch.metrics import LOST, SET_ASIDE, TRIES
from router.batch.records import ClaimedRequest
from router.batch.retry import Ending, Verdict, back_off, judge_error, judge_fault, judge_status
from router.batch.store.requests import PutBack
from router.errors import EngineGarbled, EngineLost, UpstreamError
from router.http import Endpoint, RawHeaders, UpstreamPool, UpstreamRequest, UpstreamResponse, fetch

log = logging.getLogger("conserve.router.batch.executor")

OFFLINE_PRIORITY = 10
_JSON: RawHeaders = [(b"content-type", b"application/json")]
_ENGINE_LOST = "engine lost"


def engine_key(key: str) -> RawHeaders:
    return [(b"authorization", b"Bearer " + key.encode())] if key else []


class Executor:
    def __init__(
        self,
        pool: UpstreamPool,
        flights: Flights,
        ledger: Ledger,
        limits: BatchLimits,
        settings: DispatchSettings,
        landed: Callable[[ClaimedRequest, int | None], None],
        clock: Callable[[], float],
        engine_api_key: str,
    ) -> None:
        """`landed` hears of every try's end, with the tokens it really took where they are known."""
        self._pool = pool
        self._flights = flights
        self._ledger = ledger
        self._limits = limits
        self._settings = settings
        self._landed = landed
        self._clock = clock
        self._headers = [*_JSON, *engine_key(engine_api_key)]
        self._tasks: dict[tuple[int, int], tuple[asyncio.Task[None], EngineInfo]] = {}

    def send(self, request: ClaimedRequest, line: bytes, info: EngineInfo, state: EngineState | None) -> None:
        key = (request.batch, request.line)
        self._flights.depart(key, info, state, request.prefix, request.est_tokens, request.tries)
        task = asyncio.create_task(self._fly(request, line, info))
        self._tasks[key] = (task, info)
        task.add_done_callback(lambda _: self._tasks.pop(key))

    def abort_closed(self, open_batches: set[int]) -> None:
        """Take back what belongs to batches that accept no more results."""
        for (batch, _), (task, _) in list(self._tasks.items()):
            if batch not in open_batches:
                task.cancel()

    def abort_lost(self, lost: Callable[[EngineInfo], bool]) -> None:
        """Requests at an engine that is gone are sent elsewhere without waiting for their connections."""
        for task, info in list(self._tasks.values()):
            if lost(info):
                task.cancel(_ENGINE_LOST)

    async def stop(self) -> None:
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fly(self, request: ClaimedRequest, line: bytes, info: EngineInfo) -> None:
        response: UpstreamResponse | None = None
        tokens: int | None = None
        try:
            response = await self._ask(request, line, info)
            verdict = judge_status(response.status, request.tries, self._settings)
            if verdict.final and verdict.ending is Ending.ANSWERED:
                result = answered(request, response.status, response.body)
                tokens = result.usage.input_tokens + result.usage.output_tokens
                self._ledger.result(result)
        except UpstreamError as error:
            verdict = judge_error(error, request.tries, self._settings)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (_ENGINE_LOST,):
                LOST.labels("cancelled").inc(request.est_tokens)
                raise
            verdict = judge_error(EngineLost("The engine left the fleet."), request.tries, self._settings)
        except Exception:  # a fault of ours must not leave a request leased for ever
            log.exception("request failed batch=%d line=%d", request.batch, request.line)
            verdict = judge_fault(request.tries, self._settings)
        finally:
            self._flights.land((request.batch, request.line))
        self._conclude(request, info, verdict, response)
        self._landed(request, tokens)

    async def _ask(self, request: ClaimedRequest, line: bytes, info: EngineInfo) -> UpstreamResponse:
        sent = UpstreamRequest(
            method="POST",
            target=request.endpoint.encode(),
            headers=self._headers,
            body=engine_body(line, OFFLINE_PRIORITY),
            repeatable=True,
            first_byte_timeout_s=self._settings.request_timeout_s,
        )
        endpoint = Endpoint.parse(f"http://{info.http}")
        response = await fetch(self._pool, endpoint, sent, max_bytes=self._limits.answer_bytes)
        if response.status == 200 and not response.body:
            raise EngineGarbled("The engine's answer is empty.")
        return response

    def _conclude(
        self, request: ClaimedRequest, info: EngineInfo, verdict: Verdict, response: UpstreamResponse | None
    ) -> None:
        TRIES.labels(verdict.ending).inc()
        if verdict.engine_rests:
            self._flights.engine_failed(info.engine)
        if verdict.ending is Ending.ANSWERED:
            self._flights.engine_answered(info.engine)
            return
        if verdict.counts:
            lost = verdict.ending is Ending.ENGINE_LOST
            LOST.labels("engine_lost" if lost else "error").inc(request.est_tokens)
        if not verdict.final:
            wait = back_off(request.tries + 1 if verdict.counts else 1, self._settings)
            self._ledger.put_back(PutBack(request.batch, request.line, self._clock() + wait, verdict.counts))
            return
        SET_ASIDE.inc()
        log.warning("set aside batch=%d line=%d ending=%s", request.batch, request.line, verdict.ending)
        if response is not None and response.status != 200:
            self._ledger.result(answered(request, response.status, response.body))
        elif verdict.ending is Ending.TIMEOUT:
            self._ledger.result(failed(request, "request_timeout", "The model did not answer in time."))
        else:
            message = f"Set aside after {request.tries + 1} tries: each ended in an error of the engine."
            self._ledger.result(failed(request, "set_aside", message))
