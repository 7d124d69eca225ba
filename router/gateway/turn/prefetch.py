"""Conversations whose agents are away with a tool: their KV is brought back before they return.

A restore is the conversation's last prompt sent again as offline work: the engine loads the blocks from its
host, computes nothing (`workers/coserving/restores.py`), and the next turn finds them. Only what
the directory says is parked is brought back, one conversation of this gateway at a time on an engine. A turn
that comes while its engine loads already waits there for what is left of that (`kvtransfer/checkpoint`).
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

log = logging.getLogger("conserve.router.returns")

TOKENS_OF = b"x-tokens-of-conversation"  # the engine has its answers as they were generated, and their KV
MAX_BYTES = 64 << 20  # of prompts that are kept to be sent again; who has most of them has one less
_ENTRY_BYTES = 4096  # what keeping one takes beside its bytes
_LOOK_EVERY_S = 0.25


@dataclass(slots=True)
class _Away:
    size: int
    task: asyncio.Task[None]
    sent: bool = False  # its engine has the restore


class Returns:
    def __init__(
        self,
        rules: PrefetchRules,
        directory: DirectoryClient,
        pool: UpstreamPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._directory, self._pool, self._clock = rules, directory, pool, clock
        self._away: OrderedDict[str, _Away] = OrderedDict()  # the longest away first
        self._bytes: Counter[str] = Counter()  # by owner
        self._restoring: set[str] = set()  # engines
        self._going_on: set[asyncio.Task[None]] = set()  # restores whose turn is there already

    def left(self, turn: Turn, known: Known) -> None:
        """A turn called a tool: the conversation goes on when that has ended."""
        known.left_at = self._clock()
        ahead = self._rules.prefetch(turn.prompt.hints.away_s, known.waits)
        if ahead is None:
            return
        self._forget(known.key)
        # The request and not the turn is kept: what was read of a prompt takes several times its bytes.
        told = {"brings_back": {"conversation": known.key, "due_in_s": ahead.due_in_s}}
        more = {"priority": OFFLINE_PRIORITY, "kv_transfer_params": told}
        body = one_token_body(turn.api, turn.raw, turn.body, more)
        headers = [*turn.headers, OFFLINE_HEADER, (TOKENS_OF, known.key.encode())]
        request = UpstreamRequest("POST", turn.api.target, headers, body, repeatable=False)
        task = asyncio.create_task(self._bring_back(request, known, ahead.after_s))
        size = _ENTRY_BYTES + sum(map(len, body))
        self._away[known.key] = _Away(size, task)
        self._bytes[owner_of(known.key)] += size
        while self._bytes.total() > MAX_BYTES:
            ((most, _),) = self._bytes.most_common(1)
            self._forget(next(key for key in self._away if owner_of(key) == most))

    def came(self, known: Known) -> None:
        """Its next turn is here. A load that its engine has begun is not given up: the turn would begin it
        again, behind what is left of it."""
        away = self._away.get(known.key)
        if away is not None and away.sent:
            self._going_on.add(away.task)
            away.task.add_done_callback(self._going_on.discard)
            self._drop(known.key)
        else:
            self._forget(known.key)
        if known.left_at is not None:
            known.waits = (*known.waits, self._clock() - known.left_at)[-REMEMBERED_WAITS:]
            known.left_at = None

    def close(self) -> None:
        for key in tuple(self._away):
            self._forget(key)
        for task in self._going_on:
            task.cancel()

    def _forget(self, key: str) -> None:
        if (away := self._drop(key)) is not None:
            away.task.cancel()

    def _drop(self, key: str) -> _Away | None:
        away = self._away.pop(key, None)
        if away is not None:
            self._bytes[owner_of(key)] -= away.size
            self._bytes += Counter()  # who has none left is not in it
        return away

    async def _bring_back(self, request: UpstreamRequest, known: Known, after_s: float) -> None:
        engine, epoch, outcome = known.engine, known.epoch, "returned"
        try:
            await asyncio.sleep(after_s)
            async with asyncio.timeout(self._rules.patience_s):
                while not self._may(engine, known.context_tokens):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)
            outcome = await self._restore(request, known.key, engine, epoch)
        except TimeoutError:
            outcome = "busy"
        finally:
            metrics.RESTORES_AHEAD.labels(outcome).inc()
            if (away := self._away.get(known.key)) is not None and away.task is asyncio.current_task():
                self._drop(known.key)

    def _may(self, engine: str, tokens: int) -> bool:
        state = self._directory.engines.state(engine)
        return state is not None and engine not in self._restoring and may_prefetch(state, tokens)

    async def _restore(self, request: UpstreamRequest, key: str, engine: str, epoch: int) -> str:
        self._restoring.add(engine)
        try:
            told = await self._directory.describe(key)
            info = self._directory.engines.alive(engine, epoch)
            if told is None or info is None or told["state"] != "parked":
                return "not_parked"
            if (away := self._away.get(key)) is not None:
                away.sent = True
            answer = await fetch(self._pool, Endpoint.parse(info.http), request)
            return _outcome(answer)
        except (UpstreamError, DirectoryUnavailable) as wrong:
            log.warning("not brought back conversation=%s engine=%s reason=%s", key, engine, wrong)
            return "failed"
        finally:
            self._restoring.discard(engine)


def _outcome(answer: UpstreamResponse) -> str:
    """An engine whose host has the KV no more answers as well."""
    if answer.status != 200:
        return "failed"
    usage = find_usage(answer.body)
    if usage is None or usage.cached_tokens is None:  # it does not say
        return "restored"
    return "restored" if usage.cached_tokens >= usage.prompt_tokens / 2 else "gone"
