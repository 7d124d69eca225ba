"""Finds the conversation that a new prompt continues, by the longest known prefix of the prompt.

A *node* is a point where a request's prompt ended. The longest node that is a prefix of a new prompt decides:

* no node: a new conversation;
* the newest node of a conversation, and the prompt continues after it: the next turn;
* the newest node, and the prompt ends there: a retry, or a fork while a turn of the conversation is running;
* an older node: a fork, a new conversation with that parent, on its decoder while there is capacity.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from router.identity.conversation_ids import conversation_id, id_prefix_of
from router.identity.prefix_chain import Chain, End

MAX_NODES = 500_000  # in the directory, and in each gateway
MAX_TIPS = 128  # conversations that a match considers at one node, and as many with the request's id prefix


@dataclass(frozen=True, slots=True)
class Holder:
    """Conversation with a prompt that ended at a node."""

    conversation: str
    tip: bool  # the conversation's newest prompt ended here


@dataclass(frozen=True, slots=True)
class KnownNode:
    """Longest known prefix of a prompt, and the conversations with a prompt that ended there."""

    digest: bytes
    size: int  # prompt bytes up to the node
    holders: tuple[Holder, ...]


@dataclass(slots=True)
class _Node:
    end: End
    conversations: dict[str, None] = field(default_factory=dict)  # oldest first
    tips: dict[str, None] = field(default_factory=dict)  # conversations whose newest prompt ended here
    tips_by_prefix: dict[str, dict[str, None]] = field(default_factory=dict)  # by prefix of their ids

    def add_tip(self, conversation: str) -> None:
        self.tips[conversation] = None
        self.tips_by_prefix.setdefault(id_prefix_of(conversation), {})[conversation] = None

    def remove_tip(self, conversation: str) -> None:
        if conversation in self.tips:
            del self.tips[conversation]
            alike = self.tips_by_prefix[prefix := id_prefix_of(conversation)]
            del alike[conversation]
            if not alike:
                del self.tips_by_prefix[prefix]


class NodeTable:
    """Table of the most recently used nodes and the conversations at each.

    A plain prompt rarely ends at a link of its chain. Its node then consists of a link and the bytes after
    it, the tail. The table keeps the lengths of the known tails after each link: a new prompt is hashed at
    these lengths only.
    """

    def __init__(self, capacity: int, per_conversation: int = 256) -> None:
        self._capacity = capacity
        self._per_conversation = per_conversation
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()  # least recently used first
        self._tails: dict[bytes, dict[int, int]] = {}  # by link: lengths of tails, and nodes with each
        self._tips: dict[str, bytes] = {}  # by conversation: node of its newest prompt
        self._nodes_of: dict[str, deque[bytes]] = {}  # by conversation, oldest first

    def __len__(self) -> int:
        return len(self._nodes)

    def tip(self, conversation: str) -> bytes | None:
        """Return the node where the conversation's newest prompt ended."""
        return self._tips.get(conversation)

    def record(self, end: End, conversation: str) -> None:
        """Record that the newest prompt of a conversation ended at `end`."""
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
            nodes = self._nodes_of.setdefault(conversation, deque())
            nodes.append(digest)
            if len(nodes) > self._per_conversation:
                self._remove(nodes.popleft(), conversation)
        if (before := self._nodes.get(self._tips.get(conversation, b""))) is not None:
            before.remove_tip(conversation)
        self._tips[conversation] = digest
        node.add_tip(conversation)
        while len(self._nodes) > self._capacity:
            self._evict(next(iter(self._nodes)))

    def forget(self, conversation: str) -> None:
        """Remove a conversation from all nodes."""
        self._tips.pop(conversation, None)
        for digest in self._nodes_of.pop(conversation, ()):
            self._remove(digest, conversation)

    def holders(self, digest: bytes, id_prefix: str = "") -> tuple[Holder, ...]:
        """Return the oldest conversation at a node, then those whose newest prompt ended there.

        The oldest becomes the parent of a fork. The others are limited to `MAX_TIPS`, and `MAX_TIPS` more
        whose ids begin with `id_prefix`, because a client can repeat a prompt under any number of ids.
        """
        node = self._nodes.get(digest)
        if node is None:
            return ()
        self._nodes.move_to_end(digest)
        first = next(iter(node.conversations))
        alike = islice(reversed(node.tips_by_prefix.get(id_prefix, {})), MAX_TIPS)
        newest = dict.fromkeys((*alike, *islice(reversed(node.tips), MAX_TIPS)))
        others = (Holder(one, True) for one in reversed(newest) if one != first)
        return Holder(first, first in node.tips), *others

    def tails(self, link: bytes) -> Sequence[int]:
        """Return the lengths of the known tails after a link, longest first."""
        return sorted(self._tails.get(link, ()), reverse=True)

    def find(self, chain: Chain, id_prefix: str = "") -> KnownNode | None:
        """Return the longest known prefix of a prompt, or None if no prefix of it is known."""
        for digest, size in self._known(chain):
            if holders := self.holders(digest, id_prefix):
                return KnownNode(digest, size, holders)
        return None

    def known_bytes(self, chain: Chain, conversation: str) -> int:
        """Return the bytes of the longest prefix at which a prompt of this conversation ended, or 0."""
        if conversation not in self._nodes_of:
            return 0
        for digest, size in self._known(chain):
            if conversation in self._nodes[digest].conversations:
                return size
        return 0

    def _known(self, chain: Chain) -> Iterator[tuple[bytes, int]]:
        """Yield digest and size of each prefix of the chain at which the table has a node, longest first."""
        for index in range(len(chain.links) - 1, -1, -1):
            link = chain.links[index]
            if link in self._tails:
                for tail in self.tails(link):
                    digest = chain.digest_at(index, tail)
                    if digest is not None and digest in self._nodes:
                        yield digest, chain.sizes[index] + tail
            if link in self._nodes:
                yield link, chain.sizes[index]

    def _evict(self, digest: bytes) -> None:
        for conversation in tuple(self._nodes[digest].conversations):
            nodes = self._nodes_of[conversation]
            nodes.remove(digest)
            if not nodes:
                del self._nodes_of[conversation]
            if self._tips.get(conversation) == digest:
                del self._tips[conversation]
            self._remove(digest, conversation)

    def _remove(self, digest: bytes, conversation: str) -> None:
        """Remove a conversation from a node, and a node without conversations from the table."""
        node = self._nodes.get(digest)
        if node is None:
            return
        node.conversations.pop(conversation, None)
        node.remove_tip(conversation)
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


class PrefixMatch(StrEnum):
    """Relation of a request to the known conversations."""

    EXPLICIT = "explicit"  # the request names its conversation
    CONTINUED = "continued"  # it continues after the newest request of a conversation
    RETRIED = "retried"  # it repeats the newest request, which is not running
    FORKED = "forked"  # it continues after an older request, or repeats a running one
    NEW = "new"  # no prefix of it is known


@dataclass(frozen=True, slots=True)
class Resolution:
    """Conversation chosen for a request without an id."""

    match: PrefixMatch
    conversation: str | None  # None for a new one
    parent: str | None  # a fork starts on the decoder of its parent
    known_bytes: int  # bytes of the prompt up to the known prefix


def resolve_prefix(
    known: KnownNode | None, end_digest: bytes, running: Callable[[str], bool], id_prefix: str = ""
) -> Resolution:
    """Choose the conversation of a prompt that ends at `end_digest`.

    `running` says whether a conversation has a turn in flight. Of several conversations at the node, an idle
    one is preferred, then one whose id begins with `id_prefix`.
    """
    if known is None:
        return Resolution(PrefixMatch.NEW, None, None, 0)
    tips = [holder.conversation for holder in known.holders if holder.tip]
    tips.sort(key=lambda key: not conversation_id(key).startswith(id_prefix))
    idle = [conversation for conversation in tips if not running(conversation)]
    if known.digest == end_digest:
        if idle:
            return Resolution(PrefixMatch.RETRIED, idle[0], None, known.size)
    elif tips:
        return Resolution(PrefixMatch.CONTINUED, (idle or tips)[0], None, known.size)
    return Resolution(PrefixMatch.FORKED, None, known.holders[0].conversation, known.size)
