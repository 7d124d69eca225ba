"""Conversations of an engine, and the blocks that they own in each KV cache group of the model.

A block is known by its hash (vLLM's, which covers everything before it) and its KV cache group. A
conversation's *chain* is the list of hashes of its full blocks whose KV is computed. In each group, the
conversation owns the blocks that its next token attends to: the whole chain, or the blocks of a window at its
end. Several conversations may own a block.

vLLM puts layers of one kind into one group. All groups take blocks from one pool, and a block belongs to one
group at a time. Layers with full attention keep every block of a prompt. Layers that attend to a window keep
the blocks of the window and free those before it. Layers with a state (linear attention, state spaces) need
one block, which holds the state at the end of that block. Without vLLM's hybrid manager, and for models whose
layers are all alike, there is one group.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from kvtransfer.retention.owned_blocks import BlockKey, EvictionList, EvictionOrder, EvictionRank, OwnedBlocks

STATE_WINDOW = 2  # a token needs the state in the block of the token before it, as with a window of two
FirstKept = Callable[[int], int]  # length of a chain -> index of the first block that a group keeps


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a list of blocks, and how much of a long prompt they keep."""

    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int  # bytes of one block, in all layers, on one rank
    window: int = 0  # tokens that a layer attends to; 0: all
    state: bool = False

    def first_block(self, tokens: int) -> int:
        """Return the index of the first block that the token after `tokens` tokens attends to."""
        return max(0, tokens - self.window + 1) // self.block_tokens if self.window else 0

    def first_kept(self, blocks: int) -> int:
        return self.first_block(blocks * self.block_tokens)


def block_bytes(groups: Iterable[CacheGroup]) -> int:
    """Return the size of a pool block on one rank: that of the largest group."""
    return max(group.block_bytes for group in groups)


def beside_tokens(groups: Sequence[CacheGroup]) -> int:
    """Return how many tokens of the block pool a running conversation needs for its windows and states.

    A state takes two blocks: the state at the end of the last full block, and the current one.
    """
    blocks = (2 if one.state else -(-one.window // one.block_tokens) + 1 for one in groups if one.window)
    return sum(blocks) * groups[0].block_tokens


def transferred_tokens(groups: Sequence[CacheGroup], prompt: int) -> int:
    """Return how many tokens of a prompt a prefiller transfers.

    vLLM computes the last token again, but allocates only the blocks that the token after it attends to. If
    the last token attends to an earlier block, one token less is transferred. With states, only the tokens of
    full blocks are transferred, because vLLM keeps states at the ends of blocks.
    """
    if any(group.state for group in groups):
        block = groups[0].block_tokens
        return (prompt - 1) // block * block
    shorter = any(group.first_block(prompt - 1) < group.first_block(prompt) for group in groups)
    return prompt - 1 if shorter else prompt


def all_kept(blocks: int) -> int:
    return 0


def block_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of a block in a KV cache group: its hash, and the group's number if that is not 0."""
    return block_hash + group.to_bytes(4, "big") if group else block_hash


class RetentionPhase(StrEnum):
    """Phase of a conversation on an engine."""

    RUNNING = "running"  # a turn runs or waits
    RETAINED = "retained"  # idle; its blocks stay on the accelerator as long as possible
    PARKED = "parked"  # idle; its blocks are on the host, and evictable on the accelerator


@dataclass(slots=True, eq=False)
class RetainedConversation:
    """Conversation on one engine, with the chain of its block hashes."""

    key: str
    offline: bool
    last_used: float
    phase: RetentionPhase = RetentionPhase.RUNNING
    turns: int = 0  # turns that run or wait now
    chain: list[bytes] = field(default_factory=list)
    on_host: bool = True  # False once it left a full host: its blocks get no slots
    on_disk: bool = False  # True once all of its blocks are on the disk, until its next turn
    tokens: Sequence[int] = ()  # tokens of its last turn, if its KV depends on these and `salt` alone
    salt: str = ""
    ended: bool = False  # ended while a turn ran: forgotten when the turn ends
    # Wishes of the client; None: the engine's settings hold.
    park_after_s: float | None = None  # limit for the current pause only
    ttl_s: float | None = None
    due_at: float = -inf  # when the turn for which KV was prefetched is expected
    kept_until: float = -inf  # prefetched KV is retained until then
    # Blocks without references, and counts of blocks (`BlockOwner`).
    free: EvictionList = field(default_factory=EvictionList)
    owned: int = 0
    exclusive: int = 0
    lacking: int = 0
    unstored: int = 0

    @property
    def used_at(self) -> float:
        """Return when the conversation was used last, or when its turn is due if it was prefetched."""
        return max(self.last_used, self.due_at)

    @property
    def rank(self) -> EvictionRank:
        if self.offline:
            return EvictionRank.OFFLINE
        return EvictionRank.PARKED if self.phase is RetentionPhase.PARKED else EvictionRank.RETAINED

    @property
    def eviction_order(self) -> EvictionOrder:
        return self.rank, self.phase is RetentionPhase.RUNNING, self.used_at


class RetainedConversations:
    """Conversations of one engine, and the blocks that they own."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_unwanted: Callable[[bytes], None],
        groups: Sequence[FirstKept] = (all_kept,),
    ) -> None:
        self._clock = clock
        self._groups = groups
        self._by_key: dict[str, RetainedConversation] = {}
        self.blocks = OwnedBlocks(on_unwanted)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[RetainedConversation]:
        return iter(list(self._by_key.values()))

    def get(self, key: str) -> RetainedConversation | None:
        return self._by_key.get(key)

    def keys(self, conversation: RetainedConversation) -> Iterator[bytes]:
        """Yield the key of each block of a conversation, in the order of the chain."""
        firsts = [first_kept(len(conversation.chain)) for first_kept in self._groups]
        for at, block_hash in enumerate(conversation.chain):
            yield from (block_key(block_hash, group) for group, first in enumerate(firsts) if at >= first)

    def wanted_on_host(self, block: bytes) -> bool:
        return self.blocks.wanted_on_host(block)

    def begin_turn(self, key: str, prompt: Sequence[bytes], offline: bool = False) -> RetainedConversation:
        """Record a turn that begins. The conversation keeps only the blocks with which `prompt` begins."""
        conversation = self._by_key.get(key)
        if conversation is None:
            conversation = self._by_key[key] = RetainedConversation(key, offline, self._clock())
        conversation.on_host, conversation.on_disk = True, False
        conversation.turns += 1
        conversation.ended = False
        conversation.due_at = conversation.kept_until = -inf
        self._set_phase(conversation, RetentionPhase.RUNNING)
        self._set_chain(conversation, conversation.chain[: _common(conversation.chain, prompt)])
        return conversation

    def advance(self, conversation: RetainedConversation, computed: Sequence[bytes]) -> None:
        """Set the chain to the confirmed blocks of the running turn."""
        if len(computed) != len(conversation.chain):
            self._set_chain(conversation, computed)

    def end_turn(self, conversation: RetainedConversation) -> None:
        conversation.turns -= 1
        conversation.last_used = self._clock()
        self.blocks.shared_used(conversation, self.keys(conversation))
        if conversation.turns:
            self._set_phase(conversation, RetentionPhase.RUNNING)
            return
        if conversation.ended or conversation.offline or not conversation.chain:
            self._forget(conversation)
        else:
            self._set_phase(conversation, RetentionPhase.RETAINED)

    def prefetched(self, key: str, left_at: float, due_in_s: float) -> None:
        """Retain a parked conversation again, because its KV was prefetched for a turn due in `due_in_s`.

        The conversation counts as used when the turn is due, so that it is evicted late. It is parked again
        when twice `due_in_s` have passed. Does nothing if a turn has begun since `left_at`.
        """
        conversation = self._by_key.get(key)
        if conversation is None or conversation.turns or conversation.last_used != left_at:
            return
        if conversation.phase is RetentionPhase.PARKED:
            now = self._clock()
            conversation.due_at, conversation.kept_until = now + due_in_s, now + 2 * due_in_s
            self._set_phase(conversation, RetentionPhase.RETAINED)

    def end(self, key: str) -> bool:
        """End a conversation; return whether it was known."""
        conversation = self._by_key.get(key)
        if conversation is None:
            return False
        if conversation.turns:
            conversation.ended = True
        else:
            self._forget(conversation)
        return True

    def park(self, conversation: RetainedConversation) -> None:
        if conversation.phase is RetentionPhase.RETAINED:
            self._set_phase(conversation, RetentionPhase.PARKED)

    def leave_host(self, conversation: RetainedConversation) -> None:
        """Give up a conversation's host slots. A parked conversation is retained again without them."""
        if conversation.on_host:
            conversation.on_host = False
            self.blocks.leave_host(self.keys(conversation))
        if conversation.phase is RetentionPhase.PARKED:
            self._set_phase(conversation, RetentionPhase.RETAINED)

    def retained_oldest_first(self) -> list[RetainedConversation]:
        retained = (c for c in self._by_key.values() if c.phase is RetentionPhase.RETAINED)
        return sorted(retained, key=lambda c: c.used_at)

    def idle_since(self, since: float) -> list[RetainedConversation]:
        return [c for c in self._by_key.values() if not c.turns and c.last_used <= since]

    def _forget(self, conversation: RetainedConversation) -> None:
        self._set_chain(conversation, [])
        del self._by_key[conversation.key]

    def _set_phase(self, conversation: RetainedConversation, phase: RetentionPhase) -> None:
        conversation.phase = phase
        self.blocks.reorder(conversation.free, conversation.eviction_order)

    def _set_chain(self, conversation: RetainedConversation, chain: Sequence[bytes]) -> None:
        same = _common(conversation.chain, chain)
        lost = self._beyond(conversation.chain, len(chain), same)
        gained = self._beyond(chain, len(conversation.chain), same)
        conversation.chain[same:] = chain[same:]
        self.blocks.gain(conversation, gained)
        self.blocks.lose(conversation, lost)

    def _beyond(self, chain: Sequence[bytes], other: int, same: int) -> list[BlockKey]:
        """Return the blocks that belong to `chain` but not to another chain.

        The other chain has `other` blocks; its first `same` blocks are equal to those of `chain`.
        """
        found: list[BlockKey] = []
        for group, first_kept in enumerate(self._groups):
            first, end = first_kept(len(chain)), len(chain)
            before_it = range(first, min(first_kept(other), same, end))
            after_it = range(max(first, same), end)
            found += [
                (block_key(chain[at], group), at * len(self._groups) + group)
                for at in (*before_it, *after_it)
            ]
        return found


def _common(mine: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Return the length of the common prefix by bisection: a hash covers everything before it."""
    low, high = 0, min(len(mine), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
