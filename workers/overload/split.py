"""Half of a model: what an engine's worker does to share its layers with a peer's, and to have all again.

Each engine keeps its scheduler and its requests. A batch goes through the layers that are here, and through
the others at the peer; the peer's batches come here for those that it dropped. Every layer that is kept has
KV of both: rows of this engine's blocks, and behind them the peer's.

Both workers are told in a step of their own, and meet: no phase begins on one before the other has come to
it. Every wait has a limit. Whatever goes wrong, an engine goes back to its whole model by itself: before the
peer has its KV nothing is lost; later what the peer had is, and its requests are computed again. A peer that
is left learns it from the next message, which is of another epoch or phase and is refused.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from workers.overload import vllm_internals as internals
from workers.overload.channel import Message, PeerAsk, PeerConnection, PeerServer
from workers.overload.errors import PeerError, PeerRefused, SplitOver
from workers.overload.memory import LayerWeights, ReservedKv
from workers.overload.metrics import SplitEvent
from workers.overload.orders import DropOrder, RestoreOrder, SplitReport, WorkerFacts

logger = logging.getLogger("conserve.workers.overload")

ROWS_A_MESSAGE = 64


class DeviceLock:
    """The turn to compute: vLLM has one forward context a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """By who has it and waits for the peer, whose batches go on: or both would wait for ever."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class SplitPhase(IntEnum):
    """In the order in which they are passed through."""

    WHOLE = 0
    MEETING = 1  # at a step boundary; nothing has changed
    OPEN = 2  # parameters are dropped; the peer's KV can come
    GIVEN = 3  # the peer has all KV that is its to keep
    SPLIT = 4
    LEAVING = 5  # at a step boundary; the peer's batches still come
    TAKEN = 6  # all own KV is back


@dataclass(frozen=True, slots=True)
class SplitLimits:
    meet_s: float = 10.0  # for the peer to come to a step boundary
    answer_s: float = 30.0  # of one message: the peer may be in a long step of its own
    order_s: float = 30.0  # of all messages of a drop, or of a restore: streams stand still meanwhile


@dataclass(frozen=True, slots=True)
class PeerLine:
    """How peers reach this engine, and it them."""

    host: str
    secret: bytes
    encrypt: bool = False


@dataclass
class SplitTally:
    """Since the engine's start."""

    passes: int = 0  # own batches that went through the peer
    served: int = 0  # the peer's that came here
    peer_s: float = 0.0  # in which own batches were there
    peer_bytes: int = 0  # sent there with them


@dataclass
class Membership:
    """In one split, from its order on."""

    epoch: int
    kept: range
    gone: range
    stages: tuple[tuple[range, bool], ...]  # layers in order, and whether they are here
    blocks: int = 0  # of each engine's pool; also where the peer's rows begin
    peer: PeerConnection | None = None

    @property
    def line(self) -> PeerConnection:
        """Once it is reached."""
        assert self.peer is not None
        return self.peer


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
        self._runner, self.kv, self.weights, self._whole_blocks = runner, kv, weights, blocks
        self._device, self._line, self.limits = device, line, SplitLimits()
        self._model = internals.decoder_of(runner)
        self._block_tokens = int(runner.cache_config.block_size)
        self._changed = threading.Condition()
        self._phase = SplitPhase.WHOLE
        self.member: Membership | None = None
        self._epoch = 0  # of the last split, whether it lasts or not
        self.lost = False  # in this step: KV is not what it should be, and nothing may be computed from it
        self.tally = SplitTally()
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
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        self._server.close()

    # Orders: in the worker's thread, at a step boundary, with the device

    def drop(self, order: DropOrder) -> None:
        began = time.monotonic()
        if order.epoch <= self._epoch:
            self._tell(SplitEvent.NOT_SPLIT, order.epoch, began, f"epoch {self._epoch} was later")
            return
        member, end = self._membership(order), began + self.limits.order_s
        try:
            with self._device.lent():
                self._come_together(member, order, end)
            self.weights.drop(member.gone)
            self._bind(2 * member.blocks)
            self._enter(SplitPhase.OPEN)
            with self._device.lent(), member.line.until(end):
                self.give(member, order.used)
                self._enter(SplitPhase.GIVEN)
                self._meet(member, SplitPhase.GIVEN)
        except PeerError as error:
            self._whole_again(member)
            self._tell(SplitEvent.NOT_SPLIT, order.epoch, began, str(error))
            return
        self.kv.forget(member.gone, 0, 2 * member.blocks)
        self._enter(SplitPhase.SPLIT)
        self._tell(SplitEvent.SPLIT, order.epoch, began)

    def restore(self, order: RestoreOrder) -> None:
        began, member = time.monotonic(), self.member
        if member is None or member.epoch != order.epoch:
            return  # it was lost meanwhile, and said so
        with member.line.until(began + self.limits.order_s):
            self._restore(member, order, began)

    def _restore(self, member: Membership, order: RestoreOrder, began: float) -> None:
        try:
            self._move(member, order.moves)
            self._enter(SplitPhase.LEAVING)
            with self._device.lent():
                try:
                    self._meet(member, SplitPhase.LEAVING)
                except PeerRefused as late:
                    self._enter(SplitPhase.SPLIT)
                    self._tell(SplitEvent.NOT_RESTORED, order.epoch, began, str(late))
                    return
                self.take(member, order.used)
                self._enter(SplitPhase.TAKEN)
        except PeerError as error:
            self._lost(member, error)
            return
        try:
            with self._device.lent():
                self._meet(member, SplitPhase.TAKEN)
        except PeerError as error:  # it has gone on already, or is late: all that is needed is here
            logger.info("the peer did not wait: %s", error)
        self._whole_again(member)
        self._tell(SplitEvent.RESTORED, order.epoch, began)

    def _membership(self, order: DropOrder) -> Membership:
        layers = len(self.weights)
        first, second = range(layers // 2), range(layers // 2, layers)
        kept, gone = (second, first) if order.part else (first, second)
        return Membership(order.epoch, kept, gone, ((first, kept is first), (second, kept is second)))

    def _come_together(self, member: Membership, order: DropOrder, end: float) -> None:
        with self._changed:
            self._epoch, self.member, self._phase = order.epoch, member, SplitPhase.MEETING
            self._changed.notify_all()
        member.peer = PeerConnection(
            order.peer, self._line.secret, self.limits.answer_s, encrypt=self._line.encrypt
        )
        mine = self._most_blocks(member)
        with member.line.until(end):
            theirs = self._meet(member, SplitPhase.MEETING).values
        if theirs.get("layout") != self._layout() or theirs.get("kept") != list(member.gone):
            raise PeerError("the peer has another model, other blocks, or the same half of the layers")
        member.blocks = min(mine, int(theirs["blocks"]))
        if member.blocks <= self._whole_blocks:
            raise PeerError(f"no gain: {member.blocks} blocks, and {self._whole_blocks} with the whole model")

    def _most_blocks(self, member: Membership) -> int:
        """Of a pool. Layers that are kept hold two, in the memory of all KV and of what is dropped."""
        freed = sum(map(self.weights.layer_bytes, member.gone)) // self.kv.row_bytes
        rows = (self._whole_blocks * len(self.weights) + freed) // len(member.kept)
        return min(rows, self.kv.rows) // 2

    def _layout(self) -> list[Any]:
        return [len(self.weights), self.kv.row_bytes, self._block_tokens, self.weights.layer_bytes(0)]

    def _meet(self, member: Membership, phase: SplitPhase) -> Message:
        """Until the peer has come as far."""
        return member.line.ask(Message(PeerAsk.MEET, member.epoch, {"phase": int(phase)}))

    def give(self, member: Membership, used: Sequence[int]) -> None:
        """The KV of layers that are dropped here, to who keeps them."""
        for layer in member.gone:
            for rows in _pieces(used):
                values = {"layer": layer, "rows": rows}
                member.line.ask(Message(PeerAsk.PUT, member.epoch, values, [self.kv.read(layer, rows)]))

    def take(self, member: Membership, used: Sequence[int]) -> None:
        """And back."""
        for layer in member.gone:
            for rows in _pieces(used):
                answer = member.line.ask(Message(PeerAsk.GET, member.epoch, {"layer": layer, "rows": rows}))
                self.kv.write(layer, rows, answer.tensors[0])

    def _move(self, member: Membership, moves: Mapping[int, int]) -> None:
        internals.rename_blocks(self._runner, moves)
        self.kv.move(member.kept, moves)
        if moves:
            pairs = [[old, new] for old, new in moves.items()]
            with self._device.lent():
                member.line.ask(Message(PeerAsk.MOVE, member.epoch, {"moves": pairs}))

    def _bind(self, rows: int) -> None:
        for name, view in self.kv.views(rows):
            internals.bind_kv(self._runner, name, view)
        self._runner.kv_caches[:] = [view for _, view in self.kv.views(rows)]

    def _whole_again(self, member: Membership) -> None:
        """From any phase. KV of the layers that were gone is what it was before, or what was taken."""
        with self._changed:
            self._phase, self.member = SplitPhase.WHOLE, None
            self._changed.notify_all()
        self.weights.restore(member.gone)
        self._bind(self._whole_blocks)
        self.kv.forget(range(len(self.weights)), self._whole_blocks, self.kv.rows)
        if member.peer is not None:
            member.peer.close()

    def _lost(self, member: Membership, error: PeerError) -> None:
        began = time.monotonic()
        logger.warning("split %d is over, requests are computed again: %s", member.epoch, error)
        self._whole_again(member)
        self.lost = True
        self._tell(SplitEvent.LOST, member.epoch, began, str(error))

    def _tell(self, event: SplitEvent, epoch: int, began: float, why: str = "") -> None:
        split = event in (SplitEvent.SPLIT, SplitEvent.NOT_RESTORED)
        blocks = self.member.blocks if split and self.member is not None else self._whole_blocks
        seconds = time.monotonic() - began
        self._report = SplitReport(event, epoch, blocks, seconds, why)
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
        member, batch = self.member, internals.batch_in_model(self._block_tokens)
        assert member is not None and batch is not None
        hidden = embedded if embedded is not None else self._model.embed(input_ids)
        residual: torch.Tensor | None = None
        try:
            for layers, here in member.stages:
                if here:
                    hidden, residual = self._through(layers, positions, hidden, residual)
                else:
                    hidden, residual = self._elsewhere(member, layers, batch, positions, hidden, residual)
        except PeerError as error:
            self._lost(member, error)
            return None
        hidden, _ = self._model.norm(hidden, residual)
        return hidden

    def _through(
        self, layers: range, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for index in layers:
            hidden, residual = self._model.layers[index](positions, hidden, residual)
        return hidden, residual

    def _elsewhere(
        self,
        member: Membership,
        layers: range,
        batch: internals.BatchKv,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [positions, hidden, batch.query_start, batch.seq_lens, batch.blocks, batch.slots]
        tensors = [tensor.clone() for tensor in (*tensors, *([residual] if residual is not None else []))]
        values = {
            "layers": [layers.start, layers.stop],
            "sizes": [batch.tokens, batch.longest_query, batch.longest],
        }
        began = time.monotonic()
        with self._device.lent():
            answer = member.line.ask(Message(PeerAsk.RUN, member.epoch, values, tensors))
        self.tally.passes += 1
        self.tally.peer_s += time.monotonic() - began
        self.tally.peer_bytes += sum(tensor.nbytes for tensor in tensors)
        after, left = answer.tensors
        return after, left

    # The peer's messages: in threads of the server

    def answer(self, message: Message) -> Message:
        handler: Callable[[Message], Message] = {
            PeerAsk.MEET: self._met,
            PeerAsk.PUT: self._put,
            PeerAsk.GET: self._get,
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

        with self._changed:
            came = self._changed.wait_for(decided, self.limits.meet_s)
            if self._epoch >= message.epoch and not here():
                raise SplitOver(f"epoch {message.epoch} is over here")
            if not came or self.member is None:
                raise PeerRefused(f"epoch {message.epoch} has not come so far here")
            return self.member

    def _met(self, message: Message) -> Message:
        member = self.wait_for(message, SplitPhase(message.values["phase"]))
        known = {"layout": self._layout(), "kept": list(member.kept), "blocks": self._most_blocks(member)}
        return Message(PeerAsk.DONE, message.epoch, known)

    def _put(self, message: Message) -> Message:
        member, layer = self.wait_for(message, SplitPhase.OPEN), self._kept_layer(message)
        rows = [row + self.offset(member) for row in message.values["rows"]]
        with self._device:
            self.kv.write(layer, rows, message.tensors[0])
        return Message(PeerAsk.DONE, message.epoch)

    def _get(self, message: Message) -> Message:
        member, layer = self.wait_for(message, SplitPhase.LEAVING), self._kept_layer(message)
        rows = [row + self.offset(member) for row in message.values["rows"]]
        with self._device:
            return Message(PeerAsk.DONE, message.epoch, {}, [self.kv.read(layer, rows)])

    def _moved(self, message: Message) -> Message:
        member = self.wait_for(message, SplitPhase.SPLIT)
        with self._device:
            self.kv.move(member.kept, dict(message.values["moves"]), self.offset(member))
        return Message(PeerAsk.DONE, message.epoch)

    def _run(self, message: Message) -> Message:
        member = self.wait_for(message, SplitPhase.SPLIT)
        positions, hidden, query_start, seq_lens, blocks, slots, *residual = message.tensors
        offset = self.offset(member)
        batch = internals.BatchKv(query_start, seq_lens, blocks, slots, *message.values["sizes"])
        batch = replace(
            batch,
            blocks=batch.blocks + offset,
            slots=torch.where(slots >= 0, slots + offset * self._block_tokens, slots),
        )
        layers = range(*message.values["layers"])
        names = [self._model.attention[index] for index in layers]
        with self._device:
            if self.member is not member:
                raise SplitOver(f"epoch {message.epoch} is over here")
            with internals.model_with(self._runner, names, batch, positions):
                after, left = self._through(layers, positions, hidden, residual[0] if residual else None)
            self.tally.served += 1
        return Message(PeerAsk.DONE, message.epoch, {}, [after, left])  # type: ignore[list-item]

    def offset(self, member: Membership) -> int:
        """The peer's rows are behind those of this engine's blocks."""
        return member.blocks

    def _kept_layer(self, message: Message) -> int:
        layer = int(message.values["layer"])
        if self.member is None or layer not in self.member.kept:
            raise PeerRefused(f"layer {layer} is not kept here")
        return layer


def _pieces(rows: Sequence[int]) -> Iterator[list[int]]:
    return (list(rows[at : at + ROWS_A_MESSAGE]) for at in range(0, len(rows), ROWS_A_MESSAGE))
