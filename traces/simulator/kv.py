"""Tracks the KV of a simulated engine: held by running turns, retained between turns, parked, or lost."""

from collections import OrderedDict
from enum import IntEnum, StrEnum

from traces.format import TraceConversation, TraceTurn


class Where(IntEnum):
    """Place of the KV of a conversation's earlier turns."""

    NOWHERE = 0
    ACCELERATOR = 1
    HOST = 2


class LiveConversation:
    """Conversation that is being served, with the remaining work of its current turn."""

    __slots__ = (
        *("arrived", "context", "conversation", "engine", "first_token_at", "held", "joined", "lacking"),
        *("left", "order", "stall_s", "todo", "turn_at", "turn_index", "visit", "where"),
    )

    def __init__(self, conversation: TraceConversation, order: int, now: float) -> None:
        self.conversation = conversation
        self.order = order  # place in the trace
        self.arrived = now
        self.turn_index = 0
        self.turn_at = now
        self.engine = ""  # the engine to which it is bound
        self.where = Where.NOWHERE
        self.held = 0  # tokens of KV at `where`
        self.todo = 0  # tokens that its current engine still has to compute before an output token
        self.context = 0  # tokens before `todo`, whose KV exists
        self.lacking = 0  # tokens for which its decoder waits for a prefiller
        self.left = 0  # tokens still to decode
        self.joined = 0  # iteration at which it began to decode
        self.visit = 0  # grows whenever it joins a batch: heap entries of earlier visits are void
        self.stall_s = 0.0
        self.first_token_at = 0.0

    @property
    def key(self) -> str:
        return self.conversation.id

    @property
    def turn(self) -> TraceTurn:
        return self.conversation.turns[self.turn_index]

    @property
    def output_tokens(self) -> int:
        """Return the tokens that the turn decodes, at least one."""
        return max(1, self.turn.output_tokens)

    @property
    def is_last_turn(self) -> bool:
        return self.turn_index == len(self.conversation.turns) - 1


class Pressure(StrEnum):
    """Rule for KV that is retained between turns when running turns need its space."""

    PARK = "park"  # it goes to the host
    DROP = "drop"  # it is lost, as with plain prefix caching
    PIN = "pin"  # it stays, as in the conversation paper's rule


class KvStore:
    """Counts the tokens of an engine's KV. `resident` tokens, retained ones included, are on the accelerator.

    Parking takes no time, because blocks are copied to the host as they fill and are only released on the
    accelerator. Coming back takes the time of the host link.
    """

    def __init__(self, capacity: int, pressure: Pressure) -> None:
        self.capacity = capacity
        self.pressure = pressure
        self.resident = 0
        self.parked = 0
        self.parked_in_all = 0
        self._retained: OrderedDict[str, LiveConversation] = OrderedDict()  # oldest first
        self._retained_tokens = 0

    @property
    def free(self) -> int:
        return self.capacity - self.resident

    @property
    def live(self) -> int:
        """Return the tokens that the engine reports as live. A plain prefix cache does not report idle KV."""
        return self.resident - self._retained_tokens if self.pressure is Pressure.DROP else self.resident

    @property
    def idle(self) -> int:
        """Return the part of the live tokens that can be evicted without loss."""
        return self._retained_tokens if self.pressure is Pressure.PARK else 0

    @property
    def evictable(self) -> int:
        """Return how many tokens can be evicted when KV is short."""
        return 0 if self.pressure is Pressure.PIN else self._retained_tokens

    def take(self, tokens: int) -> None:
        """Hold more tokens for a turn, and evict retained KV if necessary."""
        if tokens > self.free:
            self.make_place(tokens)
        self.resident += tokens

    def make_place(self, tokens: int, even_pinned: bool = False) -> None:
        while tokens > self.free and (self._retained_tokens if even_pinned else self.evictable):
            self.evict(next(iter(self._retained.values())))

    def resize(self, capacity: int) -> None:
        """Change the capacity, as when parameters are dropped, and evict retained KV that no longer fits."""
        self.capacity = capacity
        self.make_place(0, even_pinned=True)

    def lose(self, live: LiveConversation) -> None:
        """Drop the KV of a running or waiting turn, which then has to be computed again."""
        self.resident -= live.held
        live.held = 0

    def trim(self, live: LiveConversation, tokens: int) -> None:
        """Keep only the first `tokens` tokens, because the next prompt does not share the rest."""
        self.resident -= live.held - tokens
        live.held = tokens

    def retain(self, live: LiveConversation) -> None:
        """Keep the KV of a turn that ended, for the next turn."""
        live.where = Where.ACCELERATOR
        self._retained[live.key] = live
        self._retained_tokens += live.held

    def wake(self, live: LiveConversation) -> None:
        """Hold the KV of a retained or parked conversation again, because its next turn began."""
        if live.where is Where.ACCELERATOR:
            del self._retained[live.key]
            self._retained_tokens -= live.held
        elif live.where is Where.HOST:
            self.parked -= live.held
            self.take(live.held)
            live.where = Where.ACCELERATOR

    def evict(self, live: LiveConversation) -> None:
        """Move retained KV from the accelerator to the host, or lose it."""
        del self._retained[live.key]
        self._retained_tokens -= live.held
        self.resident -= live.held
        if self.pressure is Pressure.PARK:
            live.where = Where.HOST
            self.parked += live.held
            self.parked_in_all += live.held
        else:
            live.where = Where.NOWHERE
            live.held = 0

    def forget(self, live: LiveConversation) -> None:
        """Release the KV of an idle conversation that has ended."""
        if live.where is Where.ACCELERATOR:
            del self._retained[live.key]
            self._retained_tokens -= live.held
            self.resident -= live.held
        elif live.where is Where.HOST:
            self.parked -= live.held
        live.where, live.held = Where.NOWHERE, 0


class Prefixes:
    """Prefix cache of a prefiller, as in vLLM: the least recently used prefix is evicted first."""

    def __init__(self, capacity: int) -> None:
        """Create a cache of `capacity` tokens; with 0 it remembers nothing."""
        self._capacity = capacity
        self._tokens = 0
        self._held: OrderedDict[str, int] = OrderedDict()

    def of(self, conversation: str) -> int:
        return self._held.get(conversation, 0)

    def remember(self, conversation: str, tokens: int) -> None:
        """Store the prefix of a computed prompt, and evict older prefixes for it."""
        if tokens > self._capacity:
            return
        self._tokens += tokens - self._held.pop(conversation, 0)
        self._held[conversation] = tokens
        while self._tokens > self._capacity:
            self._tokens -= self._held.popitem(last=False)[1]


class Link:
    """Link that sends one item after another at a fixed rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def send(self, size: float, now: float) -> float:
        """Queue `size` bytes on the link, and return when the last one arrives."""
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        return self._free_at
