"""Prefetch of parked conversations: their KV is back on the accelerator before their tool call returns.

A prefetch sends the conversation's last prompt again as offline work. The engine loads the blocks from its
host and computes nothing, and the next turn finds them. Only conversations that the directory reports as
parked are prefetched, one of this gateway at a time on an engine. A turn that arrives while its engine is
loading waits there for the rest of the load (`kvtransfer/checkpoint`).
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from placement.prefetch_rules import REMEMBERED_WAITS, PrefetchRules, may_prefetch
from router import metrics
from router.directory.cache import Known
from router.directory.client import DirectoryClient
from router.errors import DirectoryUnavailable, UpstreamError
from router.gateway.turn.legs import one_token_body
from router.gateway.turn.turn import Turn
from router.http import Endpoint, UpstreamPool, UpstreamRequest, UpstreamResponse, fetch
from router.http.streams.sse_observer import find_usage
from router.identity.conversation_ids import owner_of
from router.requests.fields import OFFLINE_HEADER, OFFLINE_PRIORITY

log = logging.getLogger("conserve.router.prefetch")

TOKENS_OF = b"x-tokens-of-conversation"  # the engine uses the tokens that it generated for this conversation
MAX_BYTES = 64 << 20  # of kept prompts; beyond it the owner with the most bytes loses its oldest
_ENTRY_BYTES = 4096  # overhead of a kept prompt
_LOOK_EVERY_S = 0.25


@dataclass(slots=True)
class _Planned:
    size: int
    task: asyncio.Task[None]
    sent: bool = False  # the engine has the prefetch request


class Prefetcher:
    """Plans a prefetch when a turn calls a tool, and sends it before the tool is expected to return."""

    def __init__(
        self,
        rules: PrefetchRules,
        directory: DirectoryClient,
        pool: UpstreamPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._directory, self._pool, self._clock = rules, directory, pool, clock
        self._planned: OrderedDict[str, _Planned] = OrderedDict()  # by conversation, the oldest first
        self._bytes: Counter[str] = Counter()  # of kept prompts, by owner
        self._loading: set[str] = set()  # engines
        self._outrun: set[asyncio.Task[None]] = set()  # sent prefetches whose turn has arrived

    def tool_called(self, turn: Turn, known: Known) -> None:
        """Plan the prefetch of a conversation whose turn ended with a tool call."""
        known.tool_called_at = self._clock()
        ahead = self._rules.prefetch(turn.prompt.hints.away_s, known.tool_waits)
        if ahead is None:
            return
        self._cancel(known.key)
        # The request is kept and not the turn: a parsed prompt takes several times its bytes.
        params = {"brings_back": {"conversation": known.key, "due_in_s": ahead.due_in_s}}
        added = {"priority": OFFLINE_PRIORITY, "kv_transfer_params": params}
        body = one_token_body(turn.api, turn.raw, turn.body, added)
        headers = [*turn.headers, OFFLINE_HEADER, (TOKENS_OF, known.key.encode())]
        request = UpstreamRequest("POST", turn.api.target, headers, body, repeatable=False)
        task = asyncio.create_task(self._prefetch(request, known, ahead.after_s))
        size = _ENTRY_BYTES + sum(map(len, body))
        self._planned[known.key] = _Planned(size, task)
        self._bytes[owner_of(known.key)] += size
        while self._bytes.total() > MAX_BYTES:
            ((largest, _),) = self._bytes.most_common(1)
            self._cancel(next(key for key in self._planned if owner_of(key) == largest))

    def turn_arrived(self, known: Known) -> None:
        """Cancel the prefetch of a conversation whose next turn is here.

        A load that the engine has begun continues: the turn would begin it again, behind the rest of it.
        """
        planned = self._planned.get(known.key)
        if planned is not None and planned.sent:
            self._outrun.add(planned.task)
            planned.task.add_done_callback(self._outrun.discard)
            self._drop(known.key)
        else:
            self._cancel(known.key)
        if known.tool_called_at is not None:
            wait_s = self._clock() - known.tool_called_at
            known.tool_waits = (*known.tool_waits, wait_s)[-REMEMBERED_WAITS:]
            known.tool_called_at = None

    def close(self) -> None:
        """Cancel all prefetches."""
        for key in tuple(self._planned):
            self._cancel(key)
        for task in self._outrun:
            task.cancel()

    def _cancel(self, key: str) -> None:
        if (planned := self._drop(key)) is not None:
            planned.task.cancel()

    def _drop(self, key: str) -> _Planned | None:
        planned = self._planned.pop(key, None)
        if planned is not None:
            self._bytes[owner_of(key)] -= planned.size
            self._bytes += Counter()  # removes owners that have none left
        return planned

    async def _prefetch(self, request: UpstreamRequest, known: Known, after_s: float) -> None:
        engine, epoch, outcome = known.engine, known.epoch, "returned"
        try:
            await asyncio.sleep(after_s)
            async with asyncio.timeout(self._rules.patience_s):
                while not self._may_load(engine, known.context_tokens):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)
            outcome = await self._load(request, known.key, engine, epoch)
        except TimeoutError:
            outcome = "busy"
        finally:
            metrics.RESTORES_AHEAD.labels(outcome).inc()
            planned = self._planned.get(known.key)
            if planned is not None and planned.task is asyncio.current_task():
                self._drop(known.key)

    def _may_load(self, engine: str, tokens: int) -> bool:
        state = self._directory.engines.state(engine)
        return state is not None and engine not in self._loading and may_prefetch(state, tokens)

    async def _load(self, request: UpstreamRequest, key: str, engine: str, epoch: int) -> str:
        self._loading.add(engine)
        try:
            described = await self._directory.describe(key)
            info = self._directory.engines.alive(engine, epoch)
            if described is None or info is None or described["state"] != "parked":
                return "not_parked"
            if (planned := self._planned.get(key)) is not None:
                planned.sent = True
            answer = await fetch(self._pool, Endpoint.parse(info.http), request)
            return _outcome(answer)
        except (UpstreamError, DirectoryUnavailable) as error:
            log.warning("prefetch failed conversation=%s engine=%s reason=%s", key, engine, error)
            return "failed"
        finally:
            self._loading.discard(engine)


def _outcome(answer: UpstreamResponse) -> str:
    """Return the metric label of a prefetch. An engine whose host lost the KV answers with 200, too."""
    if answer.status != 200:
        return "failed"
    usage = find_usage(answer.body)
    if usage is None or usage.cached_tokens is None:  # the engine does not say
        return "restored"
    return "restored" if usage.cached_tokens >= usage.prompt_tokens / 2 else "gone"
