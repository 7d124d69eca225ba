"""Moves idle conversations, with their KV, off draining decoders and off hot ones.

The decoder sends the KV of an idle conversation to another decoder. If the next turn asks for its placement
while the conversation leaves a hot decoder, the turn waits for the end of the move, because it would wait
longer in the queue of the hot decoder. Any other turn that begins during a move voids it, and the KV that was
sent is dropped. A conversation can also leave a draining decoder with its next turn (`placing.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from math import ceil

from placement.engines import EngineInfo
from placement.hot_decoders import HotDecoder
from placement.routing.bindings import Binding, Bindings
from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.receipts import MoveReason, Placement
from router.directory.conversations import ConversationRecord, ConversationRecords
from router.directory.fleet import FleetView
from router.directory.placing import Effects, Placing

AT_ONCE = 4  # moves under way in the whole fleet
TRIES = 2  # moves of one conversation, counted until no engine drains any more
RELIEF_SHARE = 0.25  # share of a hot decoder's conversations that leave at a time


@dataclass(frozen=True, slots=True)
class IdleMove:
    """A move in progress: the target has a reservation, and the KV is on its way."""

    key: str
    source: EngineInfo
    target: EngineInfo
    used_at: float  # when the conversation was used last: a later turn voids the move
    reason: MoveReason
    placement: Placement


class IdleMoves:
    """Chooses idle conversations to send and binds them to their targets. It does no I/O and has no clock."""

    def __init__(
        self,
        placing: Placing,
        placer: Placer,
        bindings: Bindings,
        conversations: ConversationRecords,
        fleet: FleetView,
        effects: Effects,
    ) -> None:
        self._placing, self._placer, self._bindings = placing, placer, bindings
        self._conversations, self._fleet, self._effects = conversations, fleet, effects
        self._under_way: dict[str, MoveReason] = {}
        self._tries: dict[str, int] = {}

    def begin(self, now: float) -> list[IdleMove]:
        """Begin as many moves as may run at once, most recently used conversations first."""
        draining = [one.info.engine for one in self._fleet.records() if one.state.draining]
        if not draining:
            self._tries.clear()
            return self._relieve(now) if self._placer.settings.relieve_hot else []
        idle = (one for engine in draining for one in self._idle(engine, now))
        return self._begin(idle, AT_ONCE, now)

    def _relieve(self, now: float) -> list[IdleMove]:
        """Begin to move a small share of the hottest decoder's conversations to other decoders."""
        hot = self._placer.hot.hottest(now)
        if hot is None:
            return []
        bound = self._bindings.bound_to(hot.engine)
        idle = (one for one in self._idle(hot.engine, now) if not one[0].parked)
        begun = self._begin(idle, ceil(len(bound) * RELIEF_SHARE), now, hot)
        if begun:
            self._placer.hot.left(hot.engine, now)
        return begun

    def _begin(
        self,
        idle: Iterable[tuple[ConversationRecord, Binding]],
        most: int,
        now: float,
        hot: HotDecoder | None = None,
    ) -> list[IdleMove]:
        room, begun = min(most, AT_ONCE - len(self._under_way)), []
        for conversation, binding in nlargest(room, idle, key=lambda one: one[0].used_at):
            turn = FirstTurn(binding.key, max(1, conversation.context_tokens), None, True)
            placement = self._placing.target(turn, conversation, binding, now, hot)
            source = self._fleet.info(binding.engine)
            target = self._fleet.info(placement.decoder) if placement is not None else None
            if placement is None or source is None or target is None:
                continue
            reason = MoveReason.DRAIN if hot is None else MoveReason.HOT
            self._under_way[binding.key] = reason
            self._tries[binding.key] = self._tries.get(binding.key, 0) + 1
            if hot is not None and conversation.gateway:
                # Its gateway would begin the next turn on this engine without asking.
                self._effects.foreign.append((conversation.gateway, conversation.key))
            begun.append(IdleMove(binding.key, source, target, conversation.used_at, reason, placement))
        return begun

    def relieves(self, key: str) -> bool:
        """Return whether a conversation is leaving a hot decoder; its next turn then waits for the move."""
        return self._under_way.get(key) is MoveReason.HOT

    def end(self, move: IdleMove, sent: bool, now: float) -> bool:
        """End a move: bind the conversation to the target that has its KV, or return False if it stays."""
        self._under_way.pop(move.key, None)
        conversation, binding = self._conversations.get(move.key), self._bindings.look_up(move.key)
        stayed = binding is not None and (binding.engine, binding.epoch) == _at(move.source)
        target = self._fleet.info(move.target.engine)
        there = target is not None and _at(target) == _at(move.target)
        if conversation is not None and stayed and there and sent and self._is_idle(conversation, move):
            self._placing.rebind(conversation, move.placement, now)
            self._effects.releases.append((move.source.engine, move.key))
            return True
        if conversation is not None and move.reason is MoveReason.HOT:
            conversation.moved_at = now  # a move that failed is not tried again soon
        if stayed:
            self._placer.release(move.key, now)  # the reservation
        if there and (binding is None or binding.engine != move.target.engine):
            self._effects.releases.append((move.target.engine, move.key))
        return False

    def _idle(self, engine: str, now: float) -> Iterator[tuple[ConversationRecord, Binding]]:
        """Yield the idle conversations, with their bindings, whose KV an engine can send now."""
        if not self._placing.can_send(engine):
            return
        for key in self._bindings.bound_to(engine):
            conversation, binding = self._conversations.get(key), self._bindings.look_up(key)
            if conversation is None or binding is None or conversation.running or not conversation.turns:
                continue
            tried = key in self._under_way or self._tries.get(key, 0) >= TRIES
            if not tried and self._placing.may_move(conversation, now):
                yield conversation, binding

    def _is_idle(self, conversation: ConversationRecord, move: IdleMove) -> bool:
        return not conversation.running and conversation.used_at == move.used_at


def _at(info: EngineInfo) -> tuple[str, int]:
    return info.engine, info.epoch
