"""Places one turn: with the placer if its conversation is not bound, else on the conversation's decoder."""

from dataclasses import dataclass, field, replace
from typing import Any

from placement.hot_decoders import HotDecoder
from placement.routing.bindings import Binding, Bindings
from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import Placer
from placement.routing.receipts import Move, MoveReason, Placement, Refusal, RefusalReason
from router.directory import journal_records as journal
from router.directory.api.messages import Ask, Placed
from router.directory.conversations import ConversationRecord, ConversationRecords, PlacedTurn
from router.directory.fleet import FleetView
from router.directory.journal import Row
from router.identity.node_table import NodeTable
from router.identity.prefix_chain import End

MOVES_AGAIN_AFTER_S = 60.0  # a conversation that has moved stays there for at least this long

RESTARTED = Refusal(RefusalReason.NO_DECODER, "not all engines have reported since a restart; try again", 1.0)


@dataclass(slots=True)
class Effects:
    """Changes that calls of the table produced for the journal, the engines and the gateways."""

    rows: list[Row] = field(default_factory=list)  # rows to write to the journal
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
    """Places turns, with the bindings, conversations, engines and nodes of the binding table."""

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
        """Estimate the tokens that a turn will compute, which are charged to its owner's fair share."""
        if ask.uncached_tokens is not None:
            return ask.uncached_tokens
        return self._placer.uncached_tokens(ask.prompt_tokens, ask.prefixes, now)

    def attempt(self, ask: Ask, now: float) -> Placed | Refusal:
        binding = self._bindings.look_up(ask.key)
        if binding is not None and self._never_ran(ask):
            self.unbind(binding, now)
            binding = None
        if binding is not None:
            return self._move(ask, binding, now) or self._place_later(ask, binding, now)
        if self._fleet.awaits_some:
            return RESTARTED
        parent = self._bindings.look_up(ask.parent) if ask.parent else None
        preferred = parent.engine if parent and self._fleet.placeable(parent.engine) else None
        before = self._conversations.get(ask.key)
        had = before is not None and before.turns > 0
        first = _first_turn(ask, preferred, had=had)
        outcome = self._placer.place(first, now)
        if isinstance(outcome, Refusal):
            return outcome
        cause = "first_turn" if before is None else "rebound"
        conversation = before
        if conversation is None:
            conversation = ConversationRecord(ask.key, ask.parent, now, now)
            self._conversations.add(conversation)
        return self._bound(ask, conversation, outcome, cause, now)

    def _move(self, ask: Ask, binding: Binding, now: float) -> Placed | None:
        """Move a conversation away from its draining decoder; return None if it stays.

        It stays while another of its turns runs there, while no other decoder has room, and for a while after
        its last move. If it moves, its former decoder computes the append and sends all of the KV.
        """
        conversation = self._conversations.get(binding.key)
        if conversation is None or not self.may_leave(conversation, binding, now):
            return None
        running = conversation.running.keys()
        if running - {ask.gateway} if ask.alone else running:
            return None
        turn = _first_turn(ask, None, had=True)
        placement = self.target(turn, conversation, binding, now)
        if placement is None:
            return None
        self.release_former(conversation)
        conversation.moves_from = binding.engine
        return self._bound(ask, conversation, placement, "moved", now)

    def may_leave(self, conversation: ConversationRecord, binding: Binding, now: float) -> bool:
        """Return whether a conversation's decoder is draining and its last move is long enough ago."""
        return self._fleet.draining(binding.engine) and self.may_move(conversation, now)

    def may_move(self, conversation: ConversationRecord, now: float) -> bool:
        """Return whether a conversation's last move is long enough ago."""
        if self._fleet.awaits_some:
            return False
        return conversation.moved_at is None or now - conversation.moved_at >= MOVES_AGAIN_AFTER_S

    def can_send(self, engine: str) -> bool:
        """Return whether an engine can send KV to others; one that shares its layers has only a part."""
        info = self._fleet.info(engine)
        reachable = info is not None and bool(info.transfer) and self._fleet.placeable(engine)
        whole = not self._fleet.shares_layers(engine)
        return reachable and whole and self._placer.settings.policy.disaggregates

    def target(
        self,
        turn: FirstTurn,
        conversation: ConversationRecord,
        binding: Binding,
        now: float,
        hot: HotDecoder | None = None,
    ) -> Placement | None:
        """Reserve KV on another decoder for a conversation; return None if none has room.

        The conversation's present decoder is draining, or is `hot`.
        """
        sends, held = self.can_send(binding.engine), conversation.context_tokens
        reason = MoveReason.DRAIN if hot is None else MoveReason.HOT
        waits_s = None if hot is None else (hot.target_wait_s, hot.wait_s)
        move = Move(reason, binding.engine, held, sends, waits_s)
        placement = self._placer.place_moved(turn, move, now, hot.target if hot else None)
        return None if isinstance(placement, Refusal) else placement

    def rebind(self, conversation: ConversationRecord, placement: Placement, now: float) -> None:
        """Bind a conversation, between two turns, to the decoder that now has its KV."""
        binding = self._bind(conversation, placement, now)
        self._note(conversation, binding, placement, "moved", now)
        self._effects.rows.extend(journal.placed(conversation, binding))

    def release_former(self, conversation: ConversationRecord) -> None:
        """Release a moved conversation on its former decoder, which has sent the KV or will not send it."""
        if conversation.moves_from:
            self._effects.releases.append((conversation.moves_from, conversation.key))
            conversation.moves_from = ""

    def _bound(
        self, ask: Ask, conversation: ConversationRecord, placement: Placement, cause: str, now: float
    ) -> Placed:
        binding = self._bind(conversation, placement, now)
        return self._placed(ask, conversation, binding, placement, cause, now)

    def _bind(self, conversation: ConversationRecord, placement: Placement, now: float) -> Binding:
        info = self._fleet.info(placement.decoder)
        assert info is not None
        if placement.receipt.move is not None:
            conversation.moved_at = now
        return self._bindings.bind(conversation.key, info.engine, info.epoch, now)

    def _note(
        self,
        conversation: ConversationRecord,
        binding: Binding,
        placement: Placement,
        cause: str,
        now: float,
    ) -> dict[str, Any]:
        """Add a note with the placement's cause and receipt to the conversation's record; return the note."""
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
        return note

    def _never_ran(self, ask: Ask) -> bool:
        """Return whether an earlier call for this turn bound the conversation, but its answer was lost.

        In that case the turn's prompt is the conversation's newest, and no other turn has finished or runs.
        """
        conversation = self._conversations.get(ask.key)
        if not ask.again or ask.end is None or conversation is None:
            return False
        if conversation.turns or ask.end.digest != self._nodes.tip(ask.key):
            return False
        self._conversations.turn_ended(conversation, ask.gateway, ask.turn)
        return not conversation.running

    def _place_later(self, ask: Ask, binding: Binding, now: float) -> Placed:
        """Place a turn of a bound conversation on its decoder; a prefiller may compute the prompt."""
        conversation = self._conversations.get(ask.key)
        assert conversation is not None
        if ask.uncached_tokens is not None and self._fleet.placeable(binding.engine):
            prefix_on, epoch, tokens = conversation.prefix
            info = self._fleet.info(prefix_on)
            if info is None or info.epoch != epoch:
                prefix_on = ""
            shared = min(tokens, ask.prompt_tokens - ask.uncached_tokens)  # the rest differs from that prompt
            sizes = ask.prompt_tokens, ask.uncached_tokens
            prefix = prefix_on, max(0, shared)
            later = LaterTurn(ask.key, binding.engine, *sizes, *prefix, ask.queue_weight, ask.answers)
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
        note = self._note(conversation, binding, placement, cause, now)
        tokens = ask.prompt_tokens if ask.uncached_tokens is None else ask.uncached_tokens
        conversation.placed[ask.gateway, ask.turn] = PlacedTurn(note, tokens)
        context, known = conversation.context_tokens, cause in ("redisaggregated", "moved")
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


def _first_turn(ask: Ask, preferred: str | None, *, had: bool) -> FirstTurn:
    prompt = ask.prompt_tokens, preferred, had, ask.prefixes
    return FirstTurn(ask.key, *prompt, ask.queue_weight, ask.answers)
