"""Moves idle conversations, with their KV, away from draining decoders.

A conversation that talks moves with its next turn (`placing.py`). One that is idle is sent by its decoder to
another one, so that the drain need not wait for a turn. If a turn begins meanwhile, what was sent is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest

from placement.engines import EngineInfo
from placement.routing.bindings import Binding, Bindings
from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.receipts import Placement
from router.directory.conversations import ConversationRecord, ConversationRecords
from router.directory.fleet import FleetView
from router.directory.placing import Effects, Placing

AT_ONCE = 4  # sends of the whole fleet
TRIES = 2  # of a conversation, until no engine drains any more


@dataclass(frozen=True, slots=True)
class IdleMove:
    """A move in progress: the target has a reservation, and the KV is on its way."""

    key: str
    source: EngineInfo
    target: EngineInfo
    used_at: float  # of the conversation: a turn since then voids the move
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
        self._under_way: set[str] = set()
        self._tries: dict[str, int] = {}

    def begin(self, now: float) -> list[IdleMove]:
        """Begin as many moves as may run at once, most recently used conversations first."""
        draining = [one.info.engine for one in self._fleet.records() if one.state.draining]
        if not draining:
            self._tries.clear()
            return []
        room, begun = AT_ONCE - len(self._under_way), []
        idle = (one for engine in draining for one in self._idle(engine, now))
        for conversation, binding in nlargest(room, idle, key=lambda one: one[0].used_at):
            turn = FirstTurn(binding.key, max(1, conversation.context_tokens), None, True)
            placement = self._placing.target(turn, conversation, binding, now)
            source = self._fleet.info(binding.engine)
            target = self._fleet.info(placement.decoder) if placement is not None else None
            if placement is None or source is None or target is None:
                continue
            self._under_way.add(binding.key)
            self._tries[binding.key] = self._tries.get(binding.key, 0) + 1
            begun.append(IdleMove(binding.key, source, target, conversation.used_at, placement))
        return begun

    def end(self, move: IdleMove, sent: bool, now: float) -> bool:
        """Bind a conversation to the engine that now has its KV. Return False if it stays where it is."""
        self._under_way.discard(move.key)
        conversation, binding = self._conversations.get(move.key), self._bindings.look_up(move.key)
        stayed = binding is not None and (binding.engine, binding.epoch) == _at(move.source)
        target = self._fleet.info(move.target.engine)
        there = target is not None and _at(target) == _at(move.target)
        if conversation is not None and stayed and there and sent and self._is_idle(conversation, move):
            self._placing.rebind(conversation, move.placement, now)
            self._effects.releases.append((move.source.engine, move.key))
            return True
        if stayed:
            self._placer.release(move.key, now)  # the reservation
        if there and (binding is None or binding.engine != move.target.engine):
            self._effects.releases.append((move.target.engine, move.key))
        return False

    def _idle(self, engine: str, now: float) -> Iterator[tuple[ConversationRecord, Binding]]:
        """Yield the conversations that an engine can send now."""
        if not self._placing.can_send(engine):
            return
        for key in self._bindings.bound_to(engine):
            conversation, binding = self._conversations.get(key), self._bindings.look_up(key)
            if conversation is None or binding is None or conversation.running or not conversation.turns:
                continue
            tried = key in self._under_way or self._tries.get(key, 0) >= TRIES
            if not tried and self._placing.may_leave(conversation, binding, now):
                yield conversation, binding

    def _is_idle(self, conversation: ConversationRecord, move: IdleMove) -> bool:
        return not conversation.running and conversation.used_at == move.used_at


def _at(info: EngineInfo) -> tuple[str, int]:
    return info.engine, info.epoch
