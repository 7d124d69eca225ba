"""Part of a model: what an engine's worker does to share its layers with peers', and to have all again.

Each engine keeps its scheduler and its requests. A batch goes through the layers in order: those that are
here, and the others at the peers that keep them; peers' batches come here for those that they dropped. Every
layer that is kept has KV of all (workers/overload/membership.py).

All workers are told in a step of their own, and meet: no phase begins on one before the others have come to
it. Every wait has a limit. Whatever goes wrong, an engine goes back to its whole model by itself: before all
peers have its KV nothing is lost; later what they had is, and its requests are computed again. A peer that
is left learns it from the next message, which is of another epoch or phase and is refused.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from workers.overload import vllm_internals as internals
from workers.overload.channel import Message, PeerAsk, PeerError, PeerRefused, PeerServer, SplitOver
from workers.overload.exchange import KvBeside, LinkOrder, StandingExchange
from workers.overload.membership import (
    EXCHANGED,
    DeviceLock,
    EngineMemory,
    Membership,
    PeerLine,
    SplitLimits,
    SplitPhase,
)
from workers.overload.memory import LayerWeights, ReservedKv, ReturningWeights
from workers.overload.orders import (
    DropOrder,
    NarrowOrder,
    RestoreOrder,
    SplitEvent,
    SplitReport,
    WorkerFacts,
)
from workers.overload.pipeline import SplitPasses

logger = logging.getLogger("conserve.workers.overload")

PROTOCOL = 3  # of phases and messages: engines of another one share nothing
AGAIN_S = 0.2  # between two questions whether a peer's parameters are there


class SplitModel:
    """One a worker, of a decoder whose layers are all alike."""

    def __init__(
        self,
        runner: Any,
        kv: ReservedKv,
        weights: LayerWeights,
        blocks: int,
        device: DeviceLock,
        line: PeerLine,
    ) -> None:
        """`blocks`: of the engine with its whole model."""
        self._runner, self.kv, self.weights, self.whole_blocks = runner, kv, weights, blocks
        self._device, self._line, self.limits = device, line, SplitLimits()
        sizes = [weights.layer_bytes(layer) for layer in range(len(weights))]
        self._memory = EngineMemory(blocks, kv.row_bytes, sizes, kv.memory.page_bytes)
        self._block_tokens = int(runner.cache_config.block_size)
        self._changed = threading.Condition()
        self._phase = SplitPhase.WHOLE
        self.member: Membership | None = None
        self._epoch = 0  # of the last split, whether it lasts or not
        self.lost = False  # in this step: KV is not what it should be, and nothing may be computed from it
        self.link = LinkOrder()
        self.passes = SplitPasses(runner, device, self.link)
        self._exchange = StandingExchange(kv)
        self.giving: KvBeside | None = None
        self.fetching: KvBeside | None = None
        self._returning: ReturningWeights | None = None
        self._loaded: SplitReport | None = None  # from its thread
        self._server = PeerServer(line.host, line.secret, self.answer, encrypt=line.encrypt)
        self._report: SplitReport | None = SplitReport(SplitEvent.READY, 0, blocks, facts=self.facts())

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            self._server.address,
            len(self.weights),
            max(map(self.weights.layer_bytes, range(len(self.weights)))),
            self.kv.row_bytes,
            int(self._runner.model_config.get_hidden_size() * self._runner.model_config.dtype.itemsize),
        )

    def take_report(self) -> SplitReport | None:
        """What there is to say: of an order's end, or else of parameters that have come."""
        report, self._report = self._report, None
        if report is None:
            report = self._given()
        if report is None:
            with self._changed:
                report, self._loaded = self._loaded, None
        return report

    def close(self) -> None:
        self._server.close()

    # Orders: in the worker's thread, at a step boundary, with the device

    def drop(self, order: DropOrder) -> None:
        began = time.monotonic()
        if order.epoch <= self._epoch:
            self._tell(SplitEvent.NOT_SPLIT, order.epoch, began, f"epoch {self._epoch} was later")
            return
        member, end = Membership.of(order, len(self.weights)), began + self.limits.order_s
        try:
            with self._device.lent(), member.until(end):
                self._come_together(member)
            self._make_room(member, [*order.used, *order.cached])
            self._enter(SplitPhase.OPEN)
            with self._device.lent(), member.until(end):
                self.give(member, order.used)
                self._enter(SplitPhase.GIVEN)
                for part in member.others:
                    member.meet(part, SplitPhase.GIVEN)
        except (PeerError, MemoryError, RuntimeError) as error:  # torch's, where it finds no memory
            if not isinstance(error, PeerError):
                logger.exception("a drop came to nothing epoch=%d", order.epoch)
            self._whole_again(member)
            self._tell(SplitEvent.NOT_SPLIT, order.epoch, began, str(error))
            return
        if order.cached:
            self.giving = self._beside(PeerAsk.PUT, member, order.cached)
        else:
            self.kv.forget_aside()
        self._enter(SplitPhase.SPLIT)
        self._tell(SplitEvent.SPLIT, order.epoch, began)

    def narrow(self, order: NarrowOrder) -> None:
        """A restore begins: pools become as small as whole models', and what that frees is parameters' again,
        which come back while batches go on as before."""
        began, member = time.monotonic(), self.member
        if member is None or member.epoch != order.epoch:
            return  # it was lost meanwhile, and said so
        try:
            with member.until(began + self.limits.order_s):
                if self.giving is not None:
                    self.giving.check()
                self._move(member, order.moves)
                meetings = SplitPhase.MOVED, SplitPhase.ALL_MOVED
                if why := self._not_all_come(member, meetings, SplitPhase.SPLIT):
                    self._tell(SplitEvent.NOT_RESTORED, order.epoch, began, why)
                    return
        except PeerError as error:
            self._lost(member, error)
            return
        self.close_up(member)
        self._enter(SplitPhase.NARROW)
        self._tell(SplitEvent.NARROWED, order.epoch, began)
        self.fetching = self._beside(PeerAsk.GET, member, order.cached)
        self._returning = ReturningWeights(
            self.weights, member.gone, lambda began: self._come_back(member, began)
        )

    def _not_all_come(self, member: Membership, meetings: Sequence[SplitPhase], before: SplitPhase) -> str:
        """Why, and this engine is where it was before; or nothing. They meet twice: with more than two, one
        may have seen all come that another gave up, and must not go on by itself."""
        for phase in meetings:
            self._enter(phase)
            with self._device.lent():
                try:
                    for part in member.others:
                        member.meet(part, phase)
                except PeerRefused as late:
                    self._enter(before)
                    return str(late)
        return ""

    def close_up(self, member: Membership) -> None:
        """Regions of members become as small as their pools are."""
        blocks, member.blocks = member.blocks, self.whole_blocks
        self.kv.narrow(member.kept, len(member.parts), blocks, member.blocks)
        self.bind_rows(member.rows)

    def _come_back(self, member: Membership, began: float) -> None:
        """In the thread that has brought the parameters: when all members have theirs, it is told, and which
        blocks' KV has come."""
        end, fetching = began + self.limits.load_s, self.fetching
        if fetching is not None:
            fetching.end(self.limits.beside_s)
        with self._changed:
            if self.member is not member:
                return
            self._phase = SplitPhase.LOADED
            self._changed.notify_all()
        try:
            for part in member.others:
                self._meet_loaded(member, part, end)
        finally:
            with self._changed:
                if self.member is member:
                    come, seconds = list(fetching.gone if fetching else ()), time.monotonic() - began
                    self._loaded = SplitReport(
                        SplitEvent.LOADED, member.epoch, member.blocks, seconds, rows=come
                    )

    def _meet_loaded(self, member: Membership, part: int, end: float) -> None:
        """Who is not met in time is lost, or late: the last step sees which."""
        while self.member is member and time.monotonic() < end:
            try:
                member.meet_beside(part, SplitPhase.LOADED, self._line, self.limits)
                return
            except PeerRefused:  # its parameters are still on their way
                time.sleep(AGAIN_S)
            except PeerError as error:
                logger.info("a peer is not met while parameters come back: %s", error)
                return

    def restore(self, order: RestoreOrder) -> None:
        """It ends: KV comes home, and the engine has its whole model."""
        began, member = time.monotonic(), self.member
        if member is None or member.epoch != order.epoch:
            return  # it was lost meanwhile, and said so
        with member.until(began + self.limits.order_s):
            self._restore(member, order, began)

    def _restore(self, member: Membership, order: RestoreOrder, began: float) -> None:
        try:
            meetings = SplitPhase.LEAVING, SplitPhase.ALL_LEAVE
            if why := self._not_all_come(member, meetings, SplitPhase.LOADED):
                if order.last:
                    raise PeerError(why)
                self._tell(SplitEvent.NOT_RESTORED, order.epoch, began, why)
                return
            if self.fetching is not None:
                self.fetching.stop()
            with self._device.lent():
                self._exchange.take(member, order.used)
                self._enter(SplitPhase.TAKEN)
        except PeerError as error:
            self._lost(member, error)
            return
        with self._device.lent():
            for part in member.others:
                try:  # each of them: who has gone on says nothing of another, which may want its KV still
                    member.meet(part, SplitPhase.TAKEN)
                except PeerError as error:  # it has gone on already, or is late: all that is needed is here
                    logger.info("a peer did not wait: %s", error)
        self._whole_again(member)
        self._tell(SplitEvent.RESTORED, order.epoch, began)

    def _come_together(self, member: Membership) -> None:
        with self._changed:
            self._epoch, self.member, self._phase = member.epoch, member, SplitPhase.MEETING
            self._changed.notify_all()
        member.connect(self._line, self.limits)
        offers = [self._most_blocks(member)]
        for part in member.others:
            theirs = member.meet(part, SplitPhase.MEETING).values
            if theirs.get("layout") != self._layout() or theirs.get("part") != part:
                raise PeerError(f"{member.members[part]} has another model, other blocks, or another part")
            offers.append(int(theirs["blocks"]))
        member.blocks = min(offers)
        if member.blocks <= self.whole_blocks:
            raise PeerError(f"no gain: {member.blocks} blocks, and {self.whole_blocks} with the whole model")

    def _most_blocks(self, member: Membership) -> int:
        """Of a pool: layers that are kept hold one of each member."""
        rows = self._memory.rows_that_fit(member.kept)
        return min(rows, self.kv.rows) // len(member.parts)

    def _layout(self) -> list[Any]:
        model = len(self.weights), self.kv.row_bytes, self._block_tokens, self.weights.layer_bytes(0)
        return [PROTOCOL, *model]

    def give(self, member: Membership, used: Sequence[int]) -> None:
        self._exchange.give(member, used)

    def _beside(self, kind: PeerAsk, member: Membership, rows: Sequence[int]) -> KvBeside:
        line, limits = self._line, self.limits
        connect = partial(member.another_line, line=line, limits=limits)
        return KvBeside(kind, self.kv, member, rows, connect, self.link, limits.beside_s)

    def _given(self) -> SplitReport | None:
        """Once, when no more goes to peers beside serving: what has not gone is to be forgotten."""
        giving = self.giving
        if giving is None or not giving.ended or giving.told:
            return None
        giving.told = True
        with suppress(PeerError):
            giving.check()
            self.giving = None
            self.kv.forget_aside()
        return SplitReport(SplitEvent.GIVEN, self._epoch, 0, 0.0, "", None, *giving.fastest, giving.left)

    def give_first(self, member: Membership) -> None:
        """What the batch reads, of KV that is on its way to peers still: before the batch is. What it only
        writes need not go any more."""
        if self.giving is None:
            return
        began = time.monotonic()
        reads, writes = internals.blocks_in_batch(self._block_tokens)
        with self._device.lent():
            mine = set(self.giving.claim([*reads, *writes], self.limits.answer_s))
            self.give(member, [block for block in reads if block in mine])
        self.link.waits_s += time.monotonic() - began

    def _move(self, member: Membership, moves: Mapping[int, int]) -> None:
        internals.rename_blocks(self._runner, moves)
        self.kv.move(member.kept, moves)
        if moves:
            pairs = [[old, new] for old, new in moves.items()]
            with self._device.lent():
                for part in member.others:
                    member.ask(part, PeerAsk.MOVE, {"moves": pairs})

    def _make_room(self, member: Membership, used: Sequence[int]) -> None:
        """Memory of layers that are not kept becomes rows of those that are."""
        self.weights.drop(member.gone)
        self.kv.set_aside(member.gone, used)
        self.kv.resize(member.kept, member.rows)
        self.bind_rows(member.rows)

    def settle(self) -> None:
        """Before another thread has the device: what was launched is done. (Each has a stream of its own.)"""
        self.kv.memory.driver.settle()

    def bind_rows(self, rows: int) -> None:
        for name, view in self.kv.views(rows):
            internals.bind_kv(self._runner, name, view)
        self._runner.kv_caches[:] = [view for _, view in self.kv.views(rows)]

    def _whole_again(self, member: Membership) -> None:
        """From any phase. KV of the layers that were gone is what it was before, or what was taken."""
        with self._changed:
            self._phase, self.member = SplitPhase.WHOLE, None
            self._changed.notify_all()
            self._loaded = None
        for beside in (self.giving, self.fetching):
            if beside is not None:
                beside.stop()
        self.giving = self.fetching = None
        if self._returning is not None:
            self._returning.stop()
            self._returning = None
        self.kv.resize(member.kept, self.whole_blocks)
        self.weights.restore(member.gone)
        self.kv.put_back(self.whole_blocks)
        self.bind_rows(self.whole_blocks)
        member.close()

    def _lost(self, member: Membership, error: PeerError) -> None:
        began = time.monotonic()
        logger.warning("split %d is over, requests are computed again: %s", member.epoch, error)
        self._whole_again(member)
        self.lost = True
        self._tell(SplitEvent.LOST, member.epoch, began, str(error))

    def _tell(self, event: SplitEvent, epoch: int, began: float, why: str = "") -> None:
        blocks = self.member.blocks if self.member is not None else self.whole_blocks
        seconds = time.monotonic() - began
        self._report = SplitReport(event, epoch, blocks, seconds, why, None, *self._exchange.moved())
        logger.info("%s epoch=%d blocks=%d seconds=%.3f why=%r", event, epoch, blocks, seconds, why)

    def _enter(self, phase: SplitPhase) -> None:
        with self._changed:
            self._phase = phase
            self._changed.notify_all()

    # The model's pass: in the worker's thread, with the device

    @property
    def is_split(self) -> bool:
        return self.member is not None

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, embedded: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What the model gives; None where the peer is lost, and nothing is to be sampled."""
        member = self.member
        assert member is not None
        narrow = self._phase >= SplitPhase.NARROW
        try:
            self.give_first(member)
            return self.passes.forward(member, narrow, input_ids, positions, embedded)
        except PeerError as error:
            self._lost(member, error)
            return None

    # Peers' messages: in threads of the server

    def answer(self, message: Message) -> Message:
        handler: Callable[[Message], Message] = {
            PeerAsk.MEET: self._met,
            PeerAsk.PUT: self.put,
            PeerAsk.GET: self.get,
            PeerAsk.MOVE: self._moved,
            PeerAsk.RUN: self._run,
        }[message.kind]
        return handler(message)

    def wait_for(self, message: Message, phase: SplitPhase) -> Membership:
        """The split that the message belongs to, once this engine is in that phase of it."""

        def here() -> bool:
            return self.member is not None and self.member.epoch == message.epoch

        def decided() -> bool:
            return self._phase >= phase if here() else self._epoch >= message.epoch

        limits = self.limits
        with self._changed:
            came = self._changed.wait_for(decided, limits.order_s if phase in EXCHANGED else limits.meet_s)
            if self._epoch >= message.epoch and not here():
                raise SplitOver(f"epoch {message.epoch} is over here")
            if not came or self.member is None:
                raise PeerRefused(f"epoch {message.epoch} has not come so far here")
            return self.member

    @contextmanager
    def _device_in(self, member: Membership) -> Iterator[None]:
        with self._device:
            if self.member is not member:  # it ended while this waited
                raise SplitOver(f"epoch {member.epoch} is over here")
            yield

    def _met(self, message: Message) -> Message:
        member = self.wait_for(message, SplitPhase(message.values["phase"]))
        if message.values.get("members") != list(member.members):
            raise PeerRefused(f"epoch {message.epoch} has other members here")
        member.sender(message)
        known = {"layout": self._layout(), "part": member.part, "blocks": self._most_blocks(member)}
        return Message(PeerAsk.DONE, message.epoch, known)

    def put(self, message: Message) -> Message:
        member, layer = self.wait_for(message, SplitPhase.OPEN), self._kept_layer(message)
        rows = self._places(member, message)
        with self._device_in(member):
            self.kv.write(layer, rows, message.tensors[0])
            self.settle()
        return Message(PeerAsk.DONE, message.epoch)

    def get(self, message: Message) -> Message:
        member, layer = self.wait_for(message, SplitPhase.NARROW), self._kept_layer(message)
        rows = self._places(member, message)
        with self._device_in(member):
            return Message(PeerAsk.DONE, message.epoch, {}, [self.kv.read(layer, rows).to("cpu")])

    def _moved(self, message: Message) -> Message:
        member = self.wait_for(message, SplitPhase.SPLIT)
        moves, offset = member.moves_of(message), self.offset(member, member.sender(message))
        with self._device_in(member):
            self.kv.move(member.kept, moves, offset)
            self.settle()
        return Message(PeerAsk.DONE, message.epoch)

    def _run(self, message: Message) -> Message:
        narrow = message.values.get("narrow") is True
        member = self.wait_for(message, SplitPhase.NARROW if narrow else SplitPhase.SPLIT)
        part = member.sender(message)
        with self._device_in(member):
            if not narrow and self._phase >= SplitPhase.NARROW:
                raise SplitOver(f"pools of epoch {message.epoch} are smaller here")
            return self.passes.serve(member, message, self.offset(member, part))

    def offset(self, member: Membership, part: int) -> int:
        """Where rows of that member's blocks begin here."""
        return member.region(part)

    def _places(self, member: Membership, message: Message) -> list[int]:
        offset = self.offset(member, member.sender(message))
        return [row + offset for row in member.rows_of(message)]

    def _kept_layer(self, message: Message) -> int:
        layer = int(message.values["layer"])
        if self.member is None or layer not in self.member.kept:
            raise PeerRefused(f"layer {layer} is not kept here")
        return layer
