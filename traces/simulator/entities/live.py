"""A conversation while it is being served."""

from enum import IntEnum

from traces.format import Conversation, Turn


class Where(IntEnum):
    """Where the KV of the turns before is."""

    NOWHERE = 0
    ACCELERATOR = 1
    HOST = 2


class Live:
    """One turn runs at a time, so the work an engine does for a conversation is kept in it as well."""

    __slots__ = (
        "arrived",
        "context",
        "conversation",
        "engine",
        "first_token_at",
        "held",
        "joined",
        "lacking",
        "left",
        "order",
        "stall_s",
        "todo",
        "turn_at",
        "turn_index",
        "visit",
        "where",
    )

    def __init__(self, conversation: Conversation, order: int, now: float) -> None:
        self.conversation = conversation
        self.order = order  # place in the trace
        self.arrived = now
        self.turn_index = 0
        self.turn_at = now
        self.engine = ""  # where it is bound
        self.where = Where.NOWHERE
        self.held = 0  # tokens of KV at `where`
        self.todo = 0  # tokens the engine that serves it now has still to compute before a token comes out
        self.context = 0  # tokens in front of those
        self.lacking = 0  # tokens its decoder waits for from a prefiller
        self.left = 0  # tokens still to decode
        self.joined = 0  # iteration at which it began to decode
        self.visit = 0  # grows with every stay on an engine's batch: an older entry in its heap is void
        self.stall_s = 0.0
        self.first_token_at = 0.0

    @property
    def key(self) -> str:
        return self.conversation.id

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.turn_index]

    @property
    def output_tokens(self) -> int:
        """A turn that ended before its first token still had one decoded."""
        return max(1, self.turn.output_tokens)

    @property
    def is_last_turn(self) -> bool:
        return self.turn_index == len(self.conversation.turns) - 1
