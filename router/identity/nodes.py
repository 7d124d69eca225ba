"""Where requests have ended, and which conversations ended there: bounded, least recently used first."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.identity.chain import Chain, End


@dataclass(frozen=True, slots=True)
class Holder:
    """A conversation one of whose requests ended at a node."""

    conversation: str
    tip: bool  # it is where the conversation's newest request ended


@dataclass(frozen=True, slots=True)
class Found:
    """The longest known prefix of a prompt."""

    digest: bytes
    size: int  # prompt bytes up to it
    holders: tuple[Holder, ...]


@dataclass(slots=True)
class _Node:
    end: End
    conversations: dict[str, None] = field(default_factory=dict)  # in the order they came


class NodeTable:
    def __init__(self, capacity: int, per_conversation: int = 256) -> None:
        self._capacity = capacity
        self._per_conversation = per_conversation
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._tails: dict[bytes, dict[int, int]] = {}  # link -> length of a tail known there -> how many
        self._tips: dict[str, tuple[bytes, ...]] = {}  # newest request, then other names of it
        self._of: dict[str, deque[bytes]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def tips(self, conversation: str) -> tuple[bytes, ...]:
        return self._tips.get(conversation, ())

    def ends_of(self, conversation: str) -> list[tuple[End, bool]]:
        """What to record, in this order, to make its nodes again; true for another name of a request."""
        tips = self._tips.get(conversation, ())
        older = [digest for digest in self._of.get(conversation, ()) if digest not in tips]
        return [
            (self._nodes[digest].end, digest in tips[1:])
            for digest in (*older, *tips)
            if digest in self._nodes
        ]

    def record(self, end: End, conversation: str, *, alias: bool = False) -> None:
        """A request of `conversation` ended here: its new tip. An alias (a response's id) is one tip more."""
        digest = end.digest
        node = self._nodes.get(digest)
        if node is None:
            node = self._nodes[digest] = _Node(end)
            if end.tail_bytes:
                lengths = self._tails.setdefault(end.link, {})
                lengths[end.tail_bytes] = lengths.get(end.tail_bytes, 0) + 1
        else:
            self._nodes.move_to_end(digest)
        if conversation not in node.conversations:
            node.conversations[conversation] = None
            mine = self._of.setdefault(conversation, deque())
            mine.append(digest)
            if len(mine) > self._per_conversation:
                self._leave(mine.popleft(), conversation)
        tips = self._tips.get(conversation, ()) if alias else ()
        if digest not in tips:
            self._tips[conversation] = (*tips, digest)
        while len(self._nodes) > self._capacity:
            self._evict(next(iter(self._nodes)))

    def forget(self, conversation: str) -> None:
        self._tips.pop(conversation, None)
        for digest in self._of.pop(conversation, ()):
            self._leave(digest, conversation)

    def holders(self, digest: bytes) -> tuple[Holder, ...]:
        node = self._nodes.get(digest)
        if node is None:
            return ()
        self._nodes.move_to_end(digest)
        return tuple(Holder(one, digest in self._tips.get(one, ())) for one in node.conversations)

    def tails(self, link: bytes) -> Sequence[int]:
        """Lengths of the tails known after a link, longest first."""
        return sorted(self._tails.get(link, ()), reverse=True)

    def find(self, chain: Chain) -> Found | None:
        for index in range(len(chain.links) - 1, -1, -1):
            for tail in (*self.tails(chain.links[index]), 0):
                digest = chain.digest_at(index, tail)
                if digest is not None and (holders := self.holders(digest)):
                    return Found(digest, chain.sizes[index] + tail, holders)
        return None

    def find_of(self, chain: Chain, conversation: str) -> int:
        """Bytes of the longest prefix at which a request of this very conversation ended; 0 for none."""
        mine = self._of.get(conversation)
        if not mine:
            return 0
        for index in range(len(chain.links) - 1, -1, -1):
            for tail in (*self.tails(chain.links[index]), 0):
                digest = chain.digest_at(index, tail)
                node = self._nodes.get(digest) if digest is not None else None
                if node is not None and conversation in node.conversations:
                    return chain.sizes[index] + tail
        return 0

    def _evict(self, digest: bytes) -> None:
        for conversation in tuple(self._nodes[digest].conversations):
            mine = self._of[conversation]
            mine.remove(digest)
            if not mine:
                del self._of[conversation]
            tips = tuple(tip for tip in self._tips.get(conversation, ()) if tip != digest)
            self._tips[conversation] = tips
            if not tips:
                del self._tips[conversation]
            self._leave(digest, conversation)

    def _leave(self, digest: bytes, conversation: str) -> None:
        node = self._nodes.get(digest)
        if node is None:
            return
        node.conversations.pop(conversation, None)
        if node.conversations:
            return
        del self._nodes[digest]
        end = node.end
        if end.tail_bytes:
            lengths = self._tails[end.link]
            lengths[end.tail_bytes] -= 1
            if not lengths[end.tail_bytes]:
                del lengths[end.tail_bytes]
            if not lengths:
                del self._tails[end.link]
