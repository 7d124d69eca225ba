"""The one authoritative table: which conversations live, where each is bound, who waits for a place.

A state machine without I/O and without a clock. What has to leave it (journal records, releases on engines,
news for gateways) collects in `effects`, which the server takes after every call.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from placement.admission import Refusal
from placement.bindings import Binding, Bindings, StaleEpoch
from placement.engines import EngineInfo, EngineState
from placement.placer import FirstTurn, LaterTurn, Placement, Placer
from router.directory import records
from router.directory.conversations import Conversation, Conversations
from router.directory.fleet import Fleet
from router.directory.waiting import BEHIND, LEFT, RESTARTED, Ask, Placed, Waiter, Waiting
from router.identity.chain import End
from router.identity.nodes import NodeTable


@dataclass(frozen=True, slots=True)
class TableSettings:
    ttl_s: float = 3600.0  # a conversation without a turn for this long ends
    max_waiting: int = 4096
    max_nodes: int = 500_000
    remember_ended: int = 4096


@dataclass(slots=True)
class Effects:
    records: list[bytes] = field(default_factory=list)
    releases: list[tuple[str, str]] = field(default_factory=list)  # engine, conversation
    ended: list[tuple[str, str]] = field(default_factory=list)  # conversation, cause
    foreign: list[tuple[str, str]] = field(default_factory=list)  # gateway, conversation served elsewhere now
    placed: list[Placed] = field(default_factory=list)


class Table:
    def __init__(self, settings: TableSettings, placer: Placer) -> None:
        self._settings = settings
        self._placer = placer
        self._bindings = Bindings()
        self._waiting = Waiting(settings.max_waiting)
        self.conversations = Conversations(settings.remember_ended)
        self.fleet = Fleet(placer)
        self.nodes = NodeTable(settings.max_nodes)
        self._effects = Effects()

    def effects(self) -> Effects:
        taken, self._effects = self._effects, Effects()
        return taken

    # Turns

    def place(
        self, ask: Ask, now: float, settle: Callable[[Placed | Refusal], None]
    ) -> Placed | Refusal | Waiter:
        """An answer, or a waiter whose `settle` is called with it later."""
        if self.conversations.is_over(ask.gateway, ask.turn):
            return LEFT
        if ask.lost is not None:
            self._lost(ask, *ask.lost, now)
        if not ask.again and (ask.uncached_tokens is not None or self._bindings.look_up(ask.key) is None):
            self._placer.arrived(ask.prompt_tokens, now)
        queued = len(self._waiting) > 0 and self._bindings.look_up(ask.key) is None
        outcome: Placed | Refusal = BEHIND if queued else self._attempt(ask, now)
        if isinstance(outcome, Placed) or outcome.retry_after_s <= 0 or ask.wait_s <= 0:
            return outcome
        if self._waiting.full:
            return outcome
        waiter = Waiter(ask, now + ask.wait_s, outcome, settle)
        self._waiting.add(waiter)
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """Nobody waits for this answer any more."""
        self._waiting.remove(waiter)

    def unused(self, placed: Placed, ask: Ask, now: float) -> None:
        """An answer that could not be delivered: its turn will not run."""
        conversation = self.conversations.get(placed.key)
        if conversation is not None:
            self.conversations.turn_ended(conversation, ask.gateway, ask.turn)
            if not placed.known and not conversation.turns and not conversation.running:
                self.end(placed.key, "undelivered", now)

    def serve_waiting(self, now: float) -> None:
        self._waiting.serve(now, lambda ask: self._attempt(ask, now))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def turn_began(self, key: str, gateway: str, node: End, now: float, turn: int = 0) -> bool:
        """False when the conversation is not known (any more): the gateway must place it again."""
        conversation = self.conversations.get(key)
        if conversation is None:
            return False
        self._began(conversation, gateway, turn, node, now)
        return True

    def prefill_done(self, key: str, now: float) -> None:
        self._placer.prefill_done(key, now)

    def turn_ended(
        self,
        key: str,
        gateway: str,
        now: float,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        answer: End | None = None,
        turn: int = 0,
    ) -> bool:
        """`answer` is the node of a response id, by which the next turn may name this one. Without tokens
        the turn came to nothing; a conversation of which nothing came ends."""
        if turn and (waiter := self._waiting.of_turn(gateway, turn)):
            self._waiting.remove(waiter)
            waiter.settle(LEFT)
        conversation = self.conversations.get(key)
        self.conversations.turn_ended(conversation, gateway, turn)
        if conversation is None:
            return False
        self.conversations.touch(conversation, now)
        if prompt_tokens:
            conversation.turns += 1
            conversation.prompt_tokens = prompt_tokens
            conversation.completion_tokens = completion_tokens
            conversation.output_tokens += completion_tokens
        elif not conversation.turns and not conversation.running:
            return self.end(key, "failed_first_turn", now)
        self._effects.records.append(records.done(conversation))
        if answer is not None:
            self.nodes.record(answer, key, alias=True)
            self._effects.records.append(records.turn(key, now, answer, alias=True))
        return True

    def end(self, key: str, cause: str, now: float) -> bool:
        conversation = self.conversations.pop(key)
        if conversation is None:
            return False
        binding = self._bindings.end(key)
        self._placer.release(key, now)
        self.nodes.forget(key)
        last = {"state": "ended", "cause": cause, "ended_at": now}
        self.conversations.remember_ended(key, conversation.described(binding) | last)
        if binding is not None:
            self._effects.releases.append((binding.engine, key))
        self._effects.ended.append((key, cause))
        self._effects.records.append(records.end(key, cause, now))
        return True

    def expire(self, now: float) -> int:
        idle = self.conversations.idle_since(now - self._settings.ttl_s)
        return sum(self.end(conversation.key, "idle", now) for conversation in idle)

    def gateway_gone(self, gateway: str, now: float) -> None:
        """Its clients are gone with it. Conversations whose first turn never ended have nothing to keep."""
        for conversation in self.conversations.gateway_gone(gateway):
            self._placer.prefill_done(conversation.key, now)
            if not conversation.turns and not conversation.running:
                self.end(conversation.key, "gateway_lost", now)

    # Engines

    def engine_up(self, info: EngineInfo) -> bool:
        """False when it only goes on: its keeper or this directory restarted."""
        if self.fleet.info(info.engine) != info:
            self._effects.records.append(records.engine(info))
        new = self.fleet.up(info)
        self._void(info.engine, info.epoch - 1)
        return new

    def engine_state(self, state: EngineState, now: float) -> bool:
        return self.fleet.observe(state, now)

    def engine_down(self, engine: str) -> None:
        """Its epoch is over. (A keeper that is out of reach is no reason to say so: its engine may live.)"""
        info = self.fleet.down(engine)
        if info is not None:
            self._effects.records.append(records.engine_gone(engine))
            self._void(engine, info.epoch)

    def absent(self) -> list[Binding]:
        """Bindings on engines that the journal does not name."""
        return [binding for binding in self._bindings if binding.engine not in self.fleet]

    def void_absent(self) -> None:
        """After a restart, when every engine has had time to announce itself: those that did not are gone."""
        for binding in self.absent():
            self._void(binding.engine, binding.epoch)

    # Reading

    def binding(self, key: str) -> Binding | None:
        return self._bindings.look_up(key)

    def bound_to(self, engine: str) -> int:
        return len(self._bindings.bound_to(engine))

    def kv_in_use(self, engine: str) -> int:
        """By live conversations and reservations; 0 for an engine that holds no conversations."""
        try:
            return self._placer.kv_in_use(engine)
        except KeyError:
            return 0

    def running_at(self, key: str) -> Collection[str]:
        """The gateways at which it has a turn."""
        conversation = self.conversations.get(key)
        return conversation.running.keys() if conversation is not None else ()

    def describe(self, key: str) -> dict[str, Any] | None:
        conversation = self.conversations.get(key)
        if conversation is None:
            return self.conversations.ended(key)
        return conversation.described(self._bindings.look_up(key))

    def page(self, prefix: str, after: str | None, limit: int) -> list[dict[str, Any]]:
        found = self.conversations.page(prefix, after, limit)
        return [one.described(self._bindings.look_up(one.key)) for one in found]

    # Restart

    def replay(self, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            match records.read(payload):
                case {"k": "engine", "i": info}:
                    self.fleet.recall(records.read_engine(info))
                case {"k": "engine_gone", "engine": name}:
                    self.fleet.down(name)
                case record:
                    self._replay(record)
        self._effects = Effects()

    def snapshot(self) -> Iterator[bytes]:
        """Records from which `replay` makes this table again; lazily, against the state at each step."""
        for view in self.fleet.views():
            yield records.engine(view.info)
        for conversation in self.conversations:
            if self.conversations.get(conversation.key) is conversation:
                yield records.put(conversation, self._bindings.look_up(conversation.key))
                for node, alias in self.nodes.ends_of(conversation.key):
                    yield records.turn(conversation.key, conversation.used_at, node, alias)

    def _attempt(self, ask: Ask, now: float) -> Placed | Refusal:
        binding = self._bindings.look_up(ask.key)
        if binding is not None and self._never_ran(ask):
            self._unbind(binding, now)
            binding = None
        if binding is not None and not self._leaves(binding, ask):
            return self._place_later(ask, binding, now)
        if self.fleet.awaits_some:
            return RESTARTED if binding is None else self._place_later(ask, binding, now)
        parent = self._bindings.look_up(ask.parent) if ask.parent else None
        preferred = parent.engine if parent and self.fleet.placeable(parent.engine) else None
        before = self.conversations.get(ask.key)
        had = before is not None and before.turns > 0
        outcome = self._placer.place(FirstTurn(ask.key, ask.prompt_tokens, preferred, had), now)
        if isinstance(outcome, Refusal):
            return outcome if binding is None else self._place_later(ask, binding, now)
        info = self.fleet.info(outcome.decoder)
        assert info is not None
        conversation = self.conversations.get(ask.key)
        cause = "first_turn" if conversation is None else "moved" if binding else "rebound"
        if binding is not None:
            self._effects.releases.append((binding.engine, binding.key))
        if conversation is None:
            conversation = Conversation(ask.key, ask.parent, now, now)
            self.conversations.add(conversation)
        binding = self._bindings.bind(ask.key, info.engine, info.epoch, now)
        return self._placed(ask, conversation, binding, outcome, cause, now)

    def _leaves(self, binding: Binding, ask: Ask) -> bool:
        """Its decoder is draining, and no other turn of it runs there."""
        conversation = self.conversations.get(binding.key)
        running = conversation.running.keys() if conversation else set()
        others = running - {ask.gateway} if ask.alone else running
        return self.fleet.draining(binding.engine) and not others

    def _never_ran(self, ask: Ask) -> bool:
        """Bound by an earlier call of this ask, whose answer was lost with a directory: the very prompt it
        was bound for is its newest, and no other turn of it is done or under way."""
        conversation = self.conversations.get(ask.key)
        if not ask.again or ask.end is None or conversation is None:
            return False
        if conversation.turns or ask.end.digest not in self.nodes.tips(ask.key):
            return False
        self.conversations.turn_ended(conversation, ask.gateway, ask.turn)
        return not conversation.running

    def _place_later(self, ask: Ask, binding: Binding, now: float) -> Placed:
        """Bound already: another gateway was first, or the turn appends so much that a prefiller may help."""
        conversation = self.conversations.get(ask.key)
        assert conversation is not None
        if ask.uncached_tokens is not None and self.fleet.placeable(binding.engine):
            later = LaterTurn(ask.key, binding.engine, ask.prompt_tokens, ask.uncached_tokens)
            outcome = self._placer.place_later(later, now)
            return self._placed(ask, conversation, binding, outcome, "redisaggregated", now)
        context = conversation.context_tokens
        self._began(conversation, ask.gateway, ask.turn, ask.end, now)
        note = conversation.notes[-1] if conversation.notes else {}
        return Placed(ask.key, binding.engine, binding.epoch, None, True, "bound", note, context)

    def _placed(
        self,
        ask: Ask,
        conversation: Conversation,
        binding: Binding,
        placement: Placement,
        cause: str,
        now: float,
    ) -> Placed:
        note = {
            "at": now,
            "cause": cause,
            "prefiller": placement.prefiller,
            "decoder": binding.engine,
            "epoch": binding.epoch,
            "receipt": placement.receipt.to_json(),
        }
        conversation.note(note)
        conversation.transfers += placement.prefiller is not None
        context, known = conversation.context_tokens, cause == "redisaggregated"
        self._effects.records.append(records.put(conversation, binding))
        self._began(conversation, ask.gateway, ask.turn, ask.end, now)
        placed = Placed(
            ask.key, binding.engine, binding.epoch, placement.prefiller, known, cause, note, context
        )
        self._effects.placed.append(placed)
        return placed

    def _began(
        self, conversation: Conversation, gateway: str, turn: int, node: End | None, now: float
    ) -> None:
        if conversation.gateway and conversation.gateway != gateway:
            self._effects.foreign.append((conversation.gateway, conversation.key))
        self.conversations.touch(conversation, now)
        self.conversations.turn_began(conversation, gateway, turn)
        if node is not None:
            self.nodes.record(node, conversation.key)
            self._effects.records.append(records.turn(conversation.key, now, node))

    def _lost(self, ask: Ask, engine: str, epoch: int, now: float) -> None:
        """A gateway could not reach the decoder of a conversation. If the engine lives, it says so with its
        next report; until then nothing new goes there."""
        self.fleet.suspect(engine, epoch)
        conversation = self.conversations.get(ask.key)
        if conversation is not None:
            self.conversations.turn_ended(conversation, ask.gateway, ask.turn)
        binding = self._bindings.look_up(ask.key)
        if binding is not None and (binding.engine, binding.epoch) == (engine, epoch):
            self._unbind(binding, now)

    def _void(self, engine: str, epoch: int) -> None:
        for binding in self._bindings.void_epoch(engine, epoch):
            self._effects.records.append(records.unbound(binding.key))

    def _unbind(self, binding: Binding, now: float) -> None:
        self._bindings.end(binding.key)
        self._placer.release(binding.key, now)
        self._effects.releases.append((binding.engine, binding.key))
        self._effects.records.append(records.unbound(binding.key))

    def _replay(self, record: dict[str, Any]) -> None:
        kind = record["k"]
        if kind == "put":
            conversation = Conversation(**record["c"])
            self.conversations.add(conversation)
            self.conversations.touch(conversation, conversation.used_at)
            self._bindings.end(conversation.key)
            if record["b"] is not None:
                engine, epoch, at = record["b"]
                try:
                    self._bindings.bind(conversation.key, engine, epoch, at)
                except StaleEpoch:
                    return
            return
        key = record["key"]
        conversation_or_none = self.conversations.get(key)
        if kind == "end":
            self.end(key, record["cause"], record["at"])
        elif conversation_or_none is None:
            return
        elif kind == "turn":
            self.conversations.touch(conversation_or_none, record["at"])
            self.nodes.record(records.read_node(record["n"]), key, alias=record["alias"])
        elif kind == "done":
            self.conversations.touch(conversation_or_none, record["at"])
            for name in ("turns", "prompt_tokens", "completion_tokens", "output_tokens"):
                setattr(conversation_or_none, name, record[name])
        elif kind == "unbound":
            self._bindings.end(key)
