"""Holds the fleet's live conversations, their bindings, and the turns that wait for placement.

The table is a state machine without I/O and without a clock. It collects its effects (journal rows, releases
on engines, pushes to gateways), and the directory takes them after every call.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from placement.engines import EngineInfo, EngineState
from placement.routing.bindings import Binding, Bindings, StaleEpoch
from placement.routing.placer import Placer
from placement.routing.receipts import Refusal, RefusalReason
from router.directory import journal_records as journal
from router.directory.api.messages import Ask, Placed, TurnEnded
from router.directory.conversations import ConversationRecords
from router.directory.fleet import FleetView
from router.directory.journal import Row
from router.directory.moving import IdleMoves
from router.directory.placing import Effects, Placing
from router.directory.waiting import Waiter, Waiting
from router.identity.node_table import MAX_NODES, NodeTable
from router.identity.prefix_chain import End

LEFT = Refusal(RefusalReason.NO_CAPACITY, "the client has left", 0.0)
MOVING = Refusal(RefusalReason.NO_CAPACITY, "the conversation's KV is on its way to another decoder", 1.0)
BEHIND = Refusal(RefusalReason.NO_CAPACITY, "turns ahead of this one still wait for capacity", 1.0)


class BindingTable:
    def __init__(self, ttl_s: float, placer: Placer) -> None:
        """Create an empty table. A conversation without a turn for `ttl_s` ends."""
        self._ttl_s = ttl_s
        self._placer = placer
        self._bindings = Bindings()
        self._waiting = Waiting()
        self.conversations = ConversationRecords()
        self.fleet = FleetView(placer)
        self.nodes = NodeTable(MAX_NODES)
        self._effects = Effects()
        self._placing = Placing(
            placer, self._bindings, self.conversations, self.fleet, self.nodes, self._effects
        )

        # Conversations that an engine out of reach may still hold: by engine, its epoch and their keys.
        self._left_on: dict[str, tuple[int, set[str]]] = {}
        parts = placer, self._bindings, self.conversations, self.fleet, self._effects
        self.idle_moves = IdleMoves(self._placing, *parts)

    def effects(self) -> Effects:
        """Return the effects of all calls since the effects were last taken."""
        return self._effects.take()

    # Turns

    def place(
        self, ask: Ask, now: float, settle: Callable[[Placed | Refusal], None]
    ) -> Placed | Refusal | Waiter:
        """Place or refuse a turn, or queue it and return its waiter; `settle` gets the answer later."""
        if self.conversations.is_over(ask.gateway, ask.turn):
            return LEFT
        if ask.lost is not None:
            self._lost(ask, *ask.lost, now)
        if not ask.again and (ask.uncached_tokens is not None or self._bindings.look_up(ask.key) is None):
            self._placer.prompt_arrived(ask.prompt_tokens, now)
        due, tokens = now - ask.queue_weight, self._placing.tokens_to_compute(ask, now)
        bound = self._bindings.look_up(ask.key) is not None
        goes = bound or self._waiting.may_pass(ask, tokens, due, now)
        outcome: Placed | Refusal = self._attempt(ask, now) if goes else BEHIND
        if isinstance(outcome, Placed):
            if not bound:
                self._waiting.served(ask, tokens, now)
            return outcome
        if outcome.retry_after_s <= 0 or ask.wait_s <= 0 or self._waiting.full_for(ask):
            return outcome
        waiter = Waiter(ask, tokens, due, now + ask.wait_s, outcome, settle)
        self._waiting.add(waiter)
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """Remove a waiter whose answer is no longer wanted."""
        self._waiting.remove(waiter)

    def unused(self, placed: Placed, ask: Ask, now: float) -> None:
        """Undo a placement that did not reach its gateway: the turn will not run."""
        conversation = self.conversations.get(placed.key)
        if conversation is not None:
            self.conversations.turn_ended(conversation, ask.gateway, ask.turn)
            if not placed.known and not conversation.turns and not conversation.running:
                self.end(placed.key, "undelivered", now)

    def serve_waiting(self, now: float) -> None:
        self._waiting.serve(now, lambda ask: self._attempt(ask, now))

    def _attempt(self, ask: Ask, now: float) -> Placed | Refusal:
        return MOVING if self.idle_moves.relieves(ask.key) else self._placing.attempt(ask, now)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def refused_tokens(self) -> list[int]:
        return self._waiting.refused_tokens()

    def turn_began(self, key: str, gateway: str, node: End, now: float, turn: int = 0) -> bool:
        """Record that a turn began; return False if its conversation is unknown and must be placed again."""
        conversation = self.conversations.get(key)
        if conversation is None:
            return False
        self._placing.began(conversation, gateway, turn, node, now)
        return True

    def prefill_done(self, key: str, now: float, tokens: int = 0, cached: int | None = None) -> None:
        """Record the end of a prefill of `tokens` tokens (0 if it failed), `cached` of which were cached."""
        self._placer.prefill_done(key, now, tokens, cached)
        conversation = self.conversations.get(key)
        if conversation is not None:
            self._placing.release_former(conversation)
        if tokens and conversation is not None and conversation.notes:
            prefiller = self.fleet.info(conversation.notes[-1]["prefiller"] or "")
            if prefiller is not None:
                conversation.prefix = prefiller.engine, prefiller.epoch, tokens

    def turn_ended(self, key: str, gateway: str, now: float, ended: TurnEnded, turn: int = 0) -> bool:
        """Record a turn's end. A turn without tokens failed; a conversation ends if its only turn failed."""
        if turn and (waiter := self._waiting.of_turn(gateway, turn)):
            self._waiting.remove(waiter)
            waiter.settle(LEFT)
        conversation = self.conversations.get(key)
        placed = conversation.placed.get((gateway, turn)) if conversation is not None else None
        self.conversations.turn_ended(conversation, gateway, turn)
        self.conversations.turn_over(gateway, turn)
        if conversation is None:
            return False
        if placed is not None and ended.first_token_s:
            handover_s = ended.handover_s or None
            placed.note["took"] = {"first_token_s": ended.first_token_s, "handover_s": handover_s}
            if handover_s and placed.note["cause"] != "moved":
                self._placer.transferred(placed.tokens, handover_s)
        self._placing.release_former(conversation)
        self.conversations.touch(conversation, now)
        if ended.ttl_s:
            self.conversations.let_live(conversation, ended.ttl_s)
        if ended.prompt_tokens:
            if (binding := self._bindings.look_up(key)) is not None:
                alone = placed is not None and placed.note["prefiller"] is None
                cached = ended.cached if alone else None
                self._placer.turn_ended(key, binding.engine, ended.tokens, now, cached)
            conversation.turns += 1
            conversation.prompt_tokens = ended.prompt_tokens
            conversation.completion_tokens = ended.completion_tokens
            conversation.output_tokens += ended.completion_tokens
        elif not conversation.turns and not conversation.running:
            return self.end(key, "failed_first_turn", now)
        self._effects.rows.append(journal.turn_ended(conversation))
        return True

    def end(self, key: str, cause: str, now: float) -> bool:
        conversation = self.conversations.pop(key)
        if conversation is None:
            return False
        binding = self._bindings.end(key)
        self._placing.release_former(conversation)
        self._placer.release(key, now)
        self.nodes.forget(key)
        last = {"state": "ended", "cause": cause, "ended_at": now}
        self.conversations.remember_ended(key, conversation.described(binding) | last)
        if binding is not None:
            self._effects.releases.append((binding.engine, key))
        self._effects.ended.append((key, cause))
        self._effects.rows.append(journal.ended(key))
        return True

    def expire(self, now: float) -> int:
        return sum(self.end(one.key, "idle", now) for one in self.conversations.silent(now, self._ttl_s))

    def gateway_gone(self, gateway: str, now: float) -> None:
        """End the turns of a lost gateway, and conversations that have no finished turn."""
        for conversation in self.conversations.gateway_gone(gateway):
            self._placer.prefill_done(conversation.key, now)
            if not conversation.turns and not conversation.running:
                self.end(conversation.key, "gateway_lost", now)

    # Engines

    def engine_up(self, info: EngineInfo) -> bool:
        """Add an engine; return False if it is known already, as after a restart of keeper or directory."""
        if self.fleet.info(info.engine) != info:
            self._effects.rows.append(journal.engine(info))
        new = self.fleet.up(info)
        self._void(info.engine, info.epoch - 1)
        return new

    def engine_state(self, state: EngineState, now: float) -> bool:
        taken = self.fleet.observe(state, now)
        if taken and state.engine in self._left_on:
            epoch, keys = self._left_on.pop(state.engine)
            if epoch == state.epoch:
                self._bind_again_or_release(state.engine, epoch, keys, now)
        return taken

    def engine_down(self, engine: str) -> None:
        """Void a lost engine's bindings. If the engine later reports in the same epoch, they hold again."""
        info = self.fleet.down(engine)
        if info is not None:
            self._effects.rows.append(journal.engine_gone(engine))
            for key in self._void(engine, info.epoch):
                self.not_released(engine, info.epoch, key)

    def not_released(self, engine: str, epoch: int, key: str) -> None:
        """Note that an unreachable engine may hold a conversation, to bind or release at its next report."""
        if self._left_on.get(engine, (0,))[0] != epoch:
            self._left_on[engine] = epoch, set()
        self._left_on[engine][1].add(key)

    def _bind_again_or_release(self, engine: str, epoch: int, keys: Iterable[str], now: float) -> None:
        for key in keys:
            conversation, binding = self.conversations.get(key), self._bindings.look_up(key)
            if conversation is not None and binding is None:
                binding = self._bindings.bind(key, engine, epoch, now)
                self._effects.rows.extend(journal.placed(conversation, binding))
            elif binding is None or binding.engine != engine:
                self._effects.releases.append((engine, key))

    def absent(self) -> list[Binding]:
        """Return the bindings to engines that the fleet does not contain."""
        return [binding for binding in self._bindings if binding.engine not in self.fleet]

    def void_absent(self) -> None:
        """Void bindings to engines that were not announced in time after a restart."""
        for binding in self.absent():
            self._void(binding.engine, binding.epoch)

    # Reading

    def bindings(self) -> dict[str, tuple[str, int]]:
        """Return engine and epoch of each bound conversation."""
        return {one.key: (one.engine, one.epoch) for one in self._bindings}

    def binding(self, key: str) -> Binding | None:
        return self._bindings.look_up(key)

    def bound_to(self, engine: str) -> int:
        return len(self._bindings.bound_to(engine))

    def kv_in_use(self, engine: str) -> int:
        """Return the KV tokens of live conversations and reservations on an engine."""
        try:
            return self._placer.kv_in_use(engine)
        except KeyError:
            return 0

    def running_at(self, key: str) -> Collection[str]:
        """Return the gateways that run a turn of a conversation."""
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

    def replay(self, rows: list[Row]) -> float:
        """Rebuild the table from the journal's rows, before any other call; return their newest time."""
        found = journal.remembered(rows)
        for info in found.engines:
            self.fleet.recall(info)
        for conversation, bound, nodes in found.conversations:
            self.conversations.add(conversation)
            if bound is not None:
                engine, epoch, at = bound
                with suppress(StaleEpoch):
                    self._bindings.bind(conversation.key, engine, epoch, at)
            for end in nodes:
                self.nodes.record(end, conversation.key)
        return max((one.used_at for one, _, _ in found.conversations), default=0.0)

    def _lost(self, ask: Ask, engine: str, epoch: int, now: float) -> None:
        """Suspect a decoder that a gateway could not reach, and unbind the conversation from it.

        No turn is placed on the engine until its next report.
        """
        self.fleet.suspect(engine, epoch)
        conversation = self.conversations.get(ask.key)
        if conversation is not None:
            self.conversations.turn_ended(conversation, ask.gateway, ask.turn)
        binding = self._bindings.look_up(ask.key)
        if binding is not None and (binding.engine, binding.epoch) == (engine, epoch):
            self._placing.unbind(binding, now)

    def _void(self, engine: str, epoch: int) -> list[str]:
        """Void the bindings to an engine up to `epoch`, and return the conversations that were bound."""
        keys = [binding.key for binding in self._bindings.void_epoch(engine, epoch)]
        self._effects.rows.extend(map(journal.unbound, keys))
        return keys
