"""Sends offline requests to engines, decides how each attempt ended, and makes results durable."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError

from placement.engines import EngineInfo, EngineState
from router.batch.config import DispatchSettings
from router.batch.dispatch.in_flight import (
    Ending,
    Engines,
    InFlight,
    Verdict,
    back_off,
    judge_error,
    judge_status,
)
from router.batch.metrics import COMMIT_SECONDS, DUPLICATES, HARVESTED, LOST, SET_ASIDE, STEP_ERRORS, TRIES
from router.batch.store.database import reason_of
from router.batch.store.records import ClaimedRequest, Result, Usage, offline_body
from router.batch.store.request_table import PutBack
from router.batch.store.store import Store
from router.errors import JSON_TYPE, BadRequest, EngineGarbled, EngineLost, UpstreamError
from router.http import Endpoint, RawHeaders, UpstreamPool, UpstreamRequest, UpstreamResponse, fetch
from router.identity.prefix_groups import PrefixGroups
from router.requests.body_parser import check_items
from router.requests.cost_limits import MOST_OFFLINE_ANSWERS, PromptLimit, check_answers
from router.requests.fields import OFFLINE_HEADER, check_fields, known_part
from router.requests.ignored_fields import IgnoredFields

log = logging.getLogger("conserve.router.batch.executor")

_ANSWER_BYTES = 64 << 20
# Why a request is taken back from its engine, and what that means.
_TAKEN_BACK = {
    "engine lost": judge_error(EngineLost("The engine left the fleet.")),
    "engine shares its layers": Verdict(Ending.SHARES_LAYERS, engine_rests=False),
}
_ENGINE_LOST, _SHARES_LAYERS = _TAKEN_BACK
_HEADERS: RawHeaders = [JSON_TYPE, OFFLINE_HEADER]


class Executor:
    def __init__(
        self,
        pool: UpstreamPool,
        in_flight: InFlight,
        results: "ResultWriter",
        settings: DispatchSettings,
        tried: Callable[[ClaimedRequest, int | None], None],
        clock: Callable[[], float],
        groups: PrefixGroups,
        prompt_bytes_per_token: int,
    ) -> None:
        """Create an executor. It calls `tried` when an attempt ends, with the answer's tokens or None."""
        self._pool = pool
        self._in_flight = in_flight
        self._results = results
        self._settings = settings
        self._tried = tried
        self._groups = groups
        self._prompt_bytes_per_token = prompt_bytes_per_token
        self._ignored = IgnoredFields()
        self._clock = clock
        self._tasks: dict[tuple[int, int], tuple[asyncio.Task[None], EngineInfo]] = {}

    def send(self, request: ClaimedRequest, line: bytes, info: EngineInfo, state: EngineState | None) -> None:
        key = (request.batch, request.line)
        self._in_flight.add(key, info, state, request.prefix, request.est_tokens, request.tries)
        task = asyncio.create_task(self._try(request, line, info))
        self._tasks[key] = (task, info)
        task.add_done_callback(lambda _: self._tasks.pop(key))

    def abort_closed(self, open_batches: set[int]) -> None:
        """Cancel requests of batches that no longer accept results."""
        for (batch, _), (task, _) in list(self._tasks.items()):
            if batch not in open_batches:
                task.cancel()

    def abort_lost(self, engines: Engines) -> None:
        """Cancel requests at engines that are gone or share their layers, so that they are sent elsewhere."""
        shares = {info.engine for info, state in engines if state is not None and state.shares_layers}
        for task, info in list(self._tasks.values()):
            if self._in_flight.lost(info):
                task.cancel(_ENGINE_LOST)
            elif info.engine in shares:
                task.cancel(_SHARES_LAYERS)

    async def stop(self) -> None:
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try(self, request: ClaimedRequest, line: bytes, info: EngineInfo) -> None:
        response: UpstreamResponse | None = None
        tokens: int | None = None
        try:
            response = await self._ask(request, line, info)
            verdict = judge_status(response.status)
            if verdict.ending is Ending.ANSWERED:
                result = answered(request, response.status, response.body)
                tokens = result.usage.input_tokens + result.usage.output_tokens
                self._results.add(result)
        except BadRequest as refused:  # a refusal is the line's result, like an engine's own 400
            self._results.add(answered(request, refused.status, refused.body()))
            verdict = judge_status(refused.status)
        except UpstreamError as error:
            verdict = judge_error(error)
        except asyncio.CancelledError as cancelled:
            if not cancelled.args or cancelled.args[0] not in _TAKEN_BACK:
                LOST.labels("cancelled").inc(request.est_tokens)
                raise
            verdict = _TAKEN_BACK[cancelled.args[0]]
        except Exception:  # an error in this process must not leave the line leased for ever
            log.exception("request failed batch=%d line=%d", request.batch, request.line)
            verdict = Verdict(Ending.FAULT, engine_rests=False)
        finally:
            self._in_flight.remove((request.batch, request.line))
        self._conclude(request, info, verdict, response)
        self._tried(request, tokens)

    async def _ask(self, request: ClaimedRequest, line: bytes, info: EngineInfo) -> UpstreamResponse:
        """Send a line to an engine. The line is checked once more; BadRequest is raised if a check fails."""
        body = orjson.loads(line)["body"]
        if ignored := check_fields(request.endpoint, body):
            self._ignored.record(request.owner, request.endpoint, ignored)
            body = known_part(request.endpoint, body)
        check_items(body)
        check_answers(body, MOST_OFFLINE_ANSWERS)
        PromptLimit(info.max_context, self._prompt_bytes_per_token).check(request.endpoint, body)
        sent = UpstreamRequest(
            method="POST",
            target=request.endpoint.encode(),
            headers=_HEADERS,
            body=(offline_body(self._own_body(request.owner, body)),),
            repeatable=True,
            first_byte_timeout_s=self._settings.request_timeout_s,
        )
        response = await fetch(
            self._pool, Endpoint.parse(f"http://{info.http}"), sent, max_bytes=_ANSWER_BYTES
        )
        if response.status == 200 and not response.body:
            raise EngineGarbled("The engine's answer is empty.")
        return response

    def _own_body(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body with its owner's cache salt, which gateways set for turns too."""
        return {**body, **self._groups.fields(owner, body)}

    def _conclude(
        self, request: ClaimedRequest, info: EngineInfo, verdict: Verdict, response: UpstreamResponse | None
    ) -> None:
        ending = verdict.ending
        TRIES.labels(ending).inc()
        if verdict.engine_rests:
            self._in_flight.engine_failed(info.engine)
        if ending is Ending.ANSWERED:
            self._in_flight.engine_answered(info.engine)
            return
        if ending.counts:
            cause = "engine_lost" if ending is Ending.ENGINE_LOST else "error"
            LOST.labels(cause).inc(request.est_tokens)
        if not verdict.final(request.tries, self._settings.max_tries):
            not_before = self._clock() + back_off(request.tries + 1 if ending.counts else 1, self._settings)
            self._results.put_back(PutBack(request.batch, request.line, not_before, ending.counts))
            return
        SET_ASIDE.inc()
        log.warning("set aside batch=%d line=%d ending=%s", request.batch, request.line, ending)
        if response is not None and response.status != 200:
            self._results.add(answered(request, response.status, response.body))
        elif ending is Ending.TIMEOUT:
            self._results.add(_failed(request, "request_timeout", "The model did not answer in time."))
        else:
            message = f"Set aside after {request.tries + 1} tries, each of which ended in an error."
            self._results.add(_failed(request, "set_aside", message))


def answered(request: ClaimedRequest, status: int, body: bytes) -> Result:
    """Convert an engine's answer to a line's result: its usage, and its body as one line of JSON."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        if status == 200:
            raise EngineGarbled("The engine's answer is not JSON.") from None
        parsed = {"error": {"message": body[:500].decode(errors="replace"), "code": None}}
    usage = _usage(parsed.get("usage")) if isinstance(parsed, dict) else Usage()
    return Result(request.batch, request.line, status, orjson.dumps(parsed), secrets.token_hex(16), usage)


def _failed(request: ClaimedRequest, code: str, message: str) -> Result:
    body = orjson.dumps({"code": code, "message": message})
    return Result(request.batch, request.line, 0, body, secrets.token_hex(16))


def _usage(usage: Any) -> Usage:
    """Read the token counts from the usage object of a chat completion, a completion or a response."""
    if not isinstance(usage, dict):
        return Usage()

    def count(source: Any, *names: str) -> int:
        values = (source.get(name) for name in names) if isinstance(source, dict) else ()
        return next((value for value in values if isinstance(value, int)), 0)

    inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    outputs = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    return Usage(
        input_tokens=count(usage, "prompt_tokens", "input_tokens"),
        cached_tokens=count(inputs, "cached_tokens"),
        output_tokens=count(usage, "completion_tokens", "output_tokens"),
        reasoning_tokens=count(outputs, "reasoning_tokens"),
    )


class ResultWriter:
    """Makes results and put-back lines durable. The next commit takes all that arrive during a commit."""

    def __init__(
        self, store: Store, in_thread: Callable[[Callable[[], None]], Awaitable[None]], retry_s: float = 1.0
    ) -> None:
        self._store = store
        self._in_thread = in_thread
        self._retry_s = retry_s
        self._results: list[Result] = []
        self._put_backs: list[PutBack] = []
        self._work = asyncio.Event()

    def add(self, result: Result) -> None:
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
                    "results not written, trying again results=%d reason=%r",
                    len(self._results),
                    reason_of(error),
                )
                await asyncio.sleep(self._retry_s)

    async def flush(self) -> None:
        """Write all collected results and put-back lines; drop none before it is durable."""
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
            good = (result for result in results if result.succeeded)
            _count([result.usage for result in good if (result.batch, result.line) in accepted])
        if put_backs:
            self._store.requests.put_back(put_backs)


def _count(usages: list[Usage]) -> None:
    cached = sum(usage.cached_tokens for usage in usages)
    HARVESTED.labels("cached").inc(cached)
    HARVESTED.labels("prompt").inc(sum(usage.input_tokens for usage in usages) - cached)
    HARVESTED.labels("output").inc(sum(usage.output_tokens for usage in usages))
