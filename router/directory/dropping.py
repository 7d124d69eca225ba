"""Tells groups of decoders to share their layers under overload, and to restore them afterwards.

`placement/overload/` decides from what engines report. If an engine does not get its command, or refuses it,
the other engines of its group wait for it in vain and keep their whole models. A change takes up to two
minutes. Rounds go on meanwhile and leave the engines in a change alone.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import grpc

from placement.engines import EngineInfo, Role
from placement.overload.drop_plan import DropLimits
from placement.overload.signal import OverloadState
from placement.overload.split_orders import SharingDecoder, SplitOrders, split_orders
from router import metrics
from router.directory.api.messages import EngineRecord

log = logging.getLogger("conserve.router.directory.dropping")

ShareLayers = Callable[[EngineInfo, int, tuple[str, ...], int], Awaitable[None]]
"""Tells an engine the epoch of its group, the addresses of the members, and its own part of the layers.

Without members, the engine restores the layers that it has dropped in that epoch.
"""

_TELL_S = 5.0
# Time until all engines of a group have to report the change, their own time limits included.
CHANGE_S = {"drop": 45.0, "restore": 120.0}
_LOOK_S = 0.1
_EVERY_S = 1.0
SILENT_S = 30.0  # for this long, a silent engine may be the missing member of a group
UNWILLING_S = 60.0  # for this long, engines that failed or whose group was lost are left alone


def _is_heard(record: EngineRecord) -> bool:
    return not record.suspect and record.state.seq > 0


class Dropper:
    def __init__(
        self,
        limits: DropLimits,
        records: Callable[[], Iterable[EngineRecord]],
        share: ShareLayers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._records, self._share, self._clock = limits, records, share, clock
        self._unwilling: dict[str, float] = {}  # engine: until when it is left alone
        self._silent: dict[str, float] = {}  # engine: since when it is silent
        self._sharing_in: dict[str, int] = {}  # engine that shares its layers: epoch of its group
        self._changing: dict[str, str] = {}  # engine: its change under way, drop or restore
        self._changes: set[asyncio.Task[None]] = set()
        self._failed = 0  # rounds and changes that failed
        self._epoch = 0
        self._said = ""

    async def run(self, state: Callable[[], OverloadState]) -> None:
        """Run one round per second, until cancelled."""
        try:
            while True:
                await asyncio.sleep(_EVERY_S)
                try:
                    self.look(state())
                except Exception:  # the next round tries again
                    if self._is_to_be_logged():
                        log.exception("a round of dropping failed times=%d", self._failed)
        finally:
            for change in self._changes:
                change.cancel()

    def look(self, state: OverloadState) -> None:
        """Run one round: begin the changes that are due."""
        now = self._clock()
        self._note_lost(now)
        self._unwilling = {name: until for name, until in self._unwilling.items() if until > now}
        silent = any(since > now - SILENT_S for since in self._not_heard(now).values())
        alone = self._unwilling.keys() | self._changing.keys()
        orders = split_orders(state, self._sharing(), self._limits, alone, silent=silent)
        if not self._changing:  # otherwise the reason would be that no other engine is left
            self._say(orders)
        if "drop" not in self._changing.values():  # reports lack the KV that a drop will free
            for engines in orders.drops:
                self._begin("drop", engines)
        for engines in orders.restores:
            self._begin("restore", engines)

    def _note_lost(self, now: float) -> None:
        """Form no group for a while of engines whose group was lost, because the next might be lost too."""
        for engine, epoch in [*self._sharing_in.items()]:
            if engine in self._changing or self._epoch_of(engine) == epoch:
                continue
            del self._sharing_in[engine]
            if self._known(engine) is not None:
                self._unwilling[engine] = now + UNWILLING_S
                log.warning(
                    "a group was lost engine=%s epoch=%d left_alone_s=%.0f", engine, epoch, UNWILLING_S
                )

    async def settled(self) -> None:
        """Wait until all changes that were begun have ended."""
        while self._changes:
            await asyncio.wait(self._changes)

    def _begin(self, what: str, engines: tuple[str, ...]) -> None:
        self._changing.update(dict.fromkeys(engines, what))
        task = asyncio.create_task(self._until_over(what, engines))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _until_over(self, what: str, engines: tuple[str, ...]) -> None:
        try:
            await (self._drop if what == "drop" else self._restore)(engines)
        except Exception:  # a later round decides anew, by what the engines report
            if self._is_to_be_logged():
                log.exception("change=%s engines=%s failed times=%d", what, ",".join(engines), self._failed)
        finally:
            for engine in engines:
                del self._changing[engine]

    def _is_to_be_logged(self) -> bool:
        """Count a failure. Return True for the 1st, 2nd, 4th, ... failure, as one may occur every second."""
        metrics.OVERLOAD_ROUNDS_FAILED.inc()
        self._failed += 1
        return self._failed.bit_count() == 1

    def _sharing(self) -> list[SharingDecoder]:
        found = []
        for record in self._records():
            info, state = record.info, record.state
            if info.role is Role.PREFILL or not _is_heard(record) or state.split is None:
                continue
            held, leaving = state.live_tokens - state.idle_tokens, state.draining
            found.append(SharingDecoder(info.engine, info.tier, held, state.running, state.split, leaving))
        return found

    def _not_heard(self, now: float) -> dict[str, float]:
        """Return the decoders that are suspects or have not reported yet, and since when each is silent."""
        missing = (r.info for r in self._records() if r.info.role is not Role.PREFILL and not _is_heard(r))
        self._silent = {info.engine: self._silent.get(info.engine, now) for info in missing}
        return self._silent

    def _say(self, orders: SplitOrders) -> None:
        """Log why no group is formed although KV is lacking, but not the same reason twice in a row."""
        why = orders.why_no_more.value if orders.why_no_more else ""
        if why and why != self._said:
            log.warning("nothing is dropped reason=%s", why)
        self._said = why

    async def _drop(self, engines: tuple[str, ...]) -> None:
        self._epoch = epoch = 1 + max([self._epoch, *self._told()])
        records = [record for record in map(self._known, engines) if record is not None]
        members = tuple(record.state.split.peer for record in records if record.state.split is not None)
        if len(members) != len(engines):
            return
        tells = [self._share(record.info, epoch, members, part) for part, record in enumerate(records)]
        await self._change("drop", engines, tells, epoch)

    async def _restore(self, engines: tuple[str, ...]) -> None:
        records = [record for record in map(self._known, engines) if record is not None]
        tells = [
            self._share(record.info, record.state.split.epoch, (), 0)
            for record in records
            if record.state.split is not None
        ]
        await self._change("restore", engines, tells, 0)

    async def _change(
        self, what: str, engines: tuple[str, ...], tells: Sequence[Awaitable[None]], epoch: int
    ) -> None:
        """Send the commands of a change, wait until all engines report `epoch`, and record the outcome."""
        began = self._clock()
        outcome = "refused"
        try:
            async with asyncio.timeout(_TELL_S):
                await asyncio.gather(*tells)
            outcome = "done" if await self._until(engines, epoch, began + CHANGE_S[what]) else "failed"
        except (OSError, TimeoutError, grpc.RpcError, RuntimeError) as wrong:
            log.warning("order not taken engines=%s change=%s reason=%r", ",".join(engines), what, wrong)
        seconds = self._clock() - began
        metrics.LAYERS_SHARED.labels(what, outcome).inc()
        line = "overload change=%s engines=%s epoch=%d outcome=%s seconds=%.2f"
        log.warning(line, what, ",".join(engines), epoch, outcome, seconds)
        for engine in engines:
            self._sharing_in.pop(engine, None)
        if outcome == "done" and epoch:
            self._sharing_in.update(dict.fromkeys(engines, epoch))
        if outcome != "done":
            self._unwilling.update(dict.fromkeys(engines, self._clock() + UNWILLING_S))

    async def _until(self, engines: tuple[str, ...], epoch: int, limit: float) -> bool:
        while self._clock() < limit:
            if all(self._epoch_of(engine) == epoch for engine in engines):
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    def _told(self) -> Iterator[int]:
        """Yield the newest group epoch that each engine knows, even from before the directory's restart."""
        splits = (record.state.split for record in self._records())
        return (split.newest for split in splits if split is not None)

    def _epoch_of(self, engine: str) -> int:
        """Return the epoch of the group that an engine is in; 0 if it is gone or shares no layers."""
        record = self._known(engine)
        return record.state.split.epoch if record is not None and record.state.split is not None else 0

    def _known(self, engine: str) -> EngineRecord | None:
        return next((record for record in self._records() if record.info.engine == engine), None)
