"""Placement of one turn: by the placer where it is new, on its decoder where it is bound."""

from dataclasses import dataclass, field, replace

from placement.routing.bindings import Binding, Bindings
from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import Placer
from placement.routing.receipts import Placement, Refusal, RefusalReason
from router.directory import journal_records as journal
from router.directory.api.messages import Ask, Placed
from router.directory.conversations import ConversationRecord, ConversationRecords, PlacedTurn
from router.directory.fleet import FleetView
from router.directory.journal import Row
from router.identity.node_table import NodeTable
from router.identity.prefix_chain import End

RESTARTED = Refusal(RefusalReason.NO_DECODER, "not all engines have reported since a restart; try again", 1.0)


@dataclass(slots=True)
class Effects:
    """Outcomes of the table's calls for journal, engines and gateways."""

    rows: list[Row] = field(default_factory=list)  # for the journal
    releases: list[tuple[str, str]] = field(default_factory=list)  # engine, conversation
    ended: list[tuple[str, str]] = field(default_factory=list)  # conversation, cause
    foreign: list[tuple[str, str]] = field(default_factory=list)  # gateway, conversation served elsewhere now
    placed: list[Placed] = field(default_factory=list)

    def take(self) -> "Effects":
        """Return the collected effects, and start a new collection."""
        taken = replace(self)
        self.rows, self.releases, self.ended, self.foreign, self.placed = [], [], [], [], []
        return taken


class Placing:
    """Places asks on the table's parts; the table owns them and the queue of asks that do not fit."""

    def __init__(
        self,
        placer: Placer,
        bindings: Bindings,
        conversations: ConversationRecords,
        fleet: FleetView,
        nodes: NodeTable,
        effects: Effects,
    ) -> None:
        self._placer, self._bindings, self._conversations = placer, bindings, conversations
        self._fleet, self._nodes, self._effects = fleet, nodes, effects

    def tokens_to_compute(self, ask: Ask, now: float) -> int:
        """Estimate the tokens that a turn computes, by which owners are served fairly."""
        if ask.uncached_tokens is not None:
            return ask.uncached_tokens
        return self._placer.uncached_tokens(ask.prompt_tokens, ask.prefixes, now)

    def attempt(self, ask: Ask, now: float) -> Placed | Refusal:
        binding = self._bindings.look_up(ask.key)
        if binding is not None and self._never_ran(ask):
            self.unbind(binding, now)
            binding = None
        if binding is not None and not self._leaves(binding, ask):
            return self._place_later(ask, binding, now)
        if self._fleet.awaits_some:
            return RESTARTED if binding is None else self._place_later(ask, binding, now)
        parent = self._bindings.look_up(ask.parent) if ask.parent else None
        preferred = parent.engine if parent and self._fleet.placeable(parent.engine) else None
        before = self._conversations.get(ask.key)
        had = before is not None and before.turns > 0
        first = FirstTurn(ask.key, ask.prompt_tokens, preferred, had, ask.prefixes, ask.queue_weight)
        outcome = self._placer.place(first, now)
        if isinstance(outcome, Refusal):
            return outcome if binding is None else self._place_later(ask, binding, now)
        info = self._fleet.info(outcome.decoder)
        assert info is not None
        conversation = self._conversations.get(ask.key)
        cause = "first_turn" if conversation is None else "moved" if binding else "rebound"
        if binding is not None:
            self._effects.releases.append((binding.engine, binding.key))
        if conversation is None:
            conversation = ConversationRecord(ask.key, ask.parent, now, now)
            self._conversations.add(conversation)
        binding = self._bindings.bind(ask.key, info.engine, info.epoch, now)
        return self._placed(ask, conversation, binding, outcome, cause, now)

    def _leaves(self, binding: Binding, ask: Ask) -> bool:
        """Return whether a conversation leaves its draining decoder, where it has no other turn."""
        conversation = self._conversations.get(binding.key)
        running = conversation.running.keys() if conversation else set()
        others = running - {ask.gateway} if ask.alone else running
        return self._fleet.draining(binding.engine) and not others

    def _never_ran(self, ask: Ask) -> bool:
        """Return whether an earlier call of this ask bound the conversation, and its answer was lost.

        Then the prompt it was bound for is its newest, and no other turn is done or running.
        """
        conversation = self._conversations.get(ask.key)
        if not ask.again or ask.end is None or conversation is None:
            return False
        if conversation.turns or ask.end.digest != self._nodes.tip(ask.key):
            return False
        self._conversations.turn_ended(conversation, ask.gateway, ask.turn)
        return not conversation.running

    def _place_later(self, ask: Ask, binding: Binding, now: float) -> Placed:
        """Bound already: another gateway was first, or the turn appends so much that a prefiller may help."""
        conversation = self._conversations.get(ask.key)
        assert conversation is not None
        if ask.uncached_tokens is not None and self._fleet.placeable(binding.engine):
            prefix_on, epoch, tokens = conversation.prefix
            info = self._fleet.info(prefix_on)
            if info is None or info.epoch != epoch:
                prefix_on = ""
            shared = min(tokens, ask.prompt_tokens - ask.uncached_tokens)  # beyond that the prefix broke
            sizes = ask.prompt_tokens, ask.uncached_tokens
            later = LaterTurn(ask.key, binding.engine, *sizes, prefix_on, max(0, shared), ask.queue_weight)
            outcome = self._placer.place_later(later, now)
            return self._placed(ask, conversation, binding, outcome, "redisaggregated", now)
        context = conversation.context_tokens
        self.began(conversation, ask.gateway, ask.turn, ask.end, now)
        note = conversation.notes[-1] if conversation.notes else {}
        return Placed(ask.key, binding.engine, binding.epoch, None, True, "bound", note, context)

    def _placed(
        self,
        ask: Ask,
        conversation: ConversationRecord,
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
        tokens = ask.prompt_tokens if ask.uncached_tokens is None else ask.uncached_tokens
        conversation.placed[ask.gateway, ask.turn] = PlacedTurn(note, tokens)
        context, known = conversation.context_tokens, cause == "redisaggregated"
        self._effects.rows.extend(journal.placed(conversation, binding))
        self.began(conversation, ask.gateway, ask.turn, ask.end, now)
        placed = Placed(
            ask.key, binding.engine, binding.epoch, placement.prefiller, known, cause, note, context
        )
        self._effects.placed.append(placed)
        return placed

    def began(
        self, conversation: ConversationRecord, gateway: str, turn: int, node: End | None, now: float
    ) -> None:
        if conversation.gateway and conversation.gateway != gateway:
            self._effects.foreign.append((conversation.gateway, conversation.key))
        self._conversations.touch(conversation, now)
        self._conversations.turn_began(conversation, gateway, turn)
        if node is not None:
            self._nodes.record(node, conversation.key)
            self._effects.rows.append(journal.node(conversation.key, now, node))

    def unbind(self, binding: Binding, now: float) -> None:
        self._bindings.end(binding.key)
        self._placer.release(binding.key, now)
        self._effects.releases.append((binding.engine, binding.key))
        self._effects.rows.append(journal.unbound(binding.key))
