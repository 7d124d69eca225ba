"""Which conversation a request belongs to: by an id it carries, else by its prompt's longest known prefix.

Ids stand in headers or in the body, and the order here is the order of precedence; they are scoped by the
caller's API key. Only what was made to name a conversation does so by itself. A session id in the body or a
cache key may stand for a whole application, so that prompts of different ones never meet, and within one the
prompts decide. A correlation id, which proxies stamp on each request, only chooses among equals. A
`previous_response_id` has become the whole input when ids are looked for (`answers.py`).
Where a request's prompt ended is a *node*; the longest known node of a new prompt decides:

* none: a new conversation;
* the newest of its conversation, and the prompt goes on: the same conversation;
* the newest, and the prompt ends there: a retry of it, or a fork while a turn of it is running;
* an older one: a fork, a new conversation with that parent, on its decoder while there is capacity.
"""

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from typing import Any
from uuid import uuid4

from xxhash import xxh3_128_hexdigest

from router.errors import BadIdentity
from router.identity.prefix_chain import Chain, End

ID_HEADERS = (
    "x-conversation-id",
    "x-session-id",
    "x-session-affinity",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-litellm-session-id",
    "x-smg-routing-key",
    "x-flow-conversation-id",
)
BODY_SESSIONS = ("session_id", "conversation_id")  # an application may send the same for all
PARENT_HEADERS = (
    "x-parent-conversation-id",
    "x-parent-session-id",
    "x-dynamo-parent-session-id",
    "x-codex-parent-thread-id",
)
TOKEN_HEADER = "x-session-token"  # llm-d's clients send back what they were given; its own name engines
CORRELATION_HEADER = "x-correlation-id"
AGENT_HEADER = "x-claude-code-agent-id"
PARENT_AGENT_HEADER = "x-claude-code-parent-agent-id"

MAX_ID_BYTES = 512
MAX_NODES = 500_000  # ends of prompts remembered, by the directory and by each gateway
_NAME_BYTES = 64  # of a hint, in the id of a conversation that is named after it
_UNNAMED = "c-"
_ALPHABET = r"[A-Za-z0-9._~:/@+=,|#-]"  # nothing that HTML, a shell or a log line gives a meaning to
_PLAIN = re.compile(f"{_ALPHABET}{{1,128}}")
_GIVEN = re.compile(
    f"c-[0-9a-f]{{32}}|{_ALPHABET}{{1,64}}[.][0-9a-f]{{12}}"
)  # as `Explicit.new_id` makes them


@dataclass(frozen=True, slots=True)
class Explicit:
    """What a request says about its own identity; ids are already safe for a header and a URL."""

    id: str | None
    parent: str | None
    source: str  # the header or body field the id came from, empty without one
    group: str = ""  # prompts of different groups share nothing: a session in the body, a cache key
    hint: str = ""  # what a conversation found without an id is named after

    @property
    def name(self) -> str:
        """How ids begin of conversations that this request's hint has named."""
        return f"{self.hint[:_NAME_BYTES]}." if self.hint else _UNNAMED

    def new_id(self) -> str:
        unique = uuid4().hex
        return f"{self.name}{unique[:12] if self.hint else unique}"


def namespace(api_key: str) -> str:
    """Clients choose their ids, so that every id is scoped by the key it came with."""
    return sha256(api_key.encode()).hexdigest()[:16]


EVERYBODY = "*"


class PrefixGroups:
    """Who shares cached prefixes with whom: by default nobody, or each could tell what others have asked.

    vLLM finds a cached block only under the salt that it was made with. `shared`: the owners who share
    theirs, or EVERYBODY.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        self._shared = frozenset(shared)

    def fields(self, space: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the fleet says in a request's body, in the place of what a client said."""
        fields: dict[str, Any] = {}
        group = space
        if EVERYBODY in self._shared:
            group = ""
        elif space in self._shared:
            group = "*shared"  # no owner is called so
        if own := body.get("cache_salt"):  # apart within the group
            fields["cache_salt"] = sha256(f"{group}\0{own}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        elif group:
            fields["cache_salt"] = group
        if "session_id" in body:
            fields["session_id"] = None  # it would override the header with the conversation's scoped id
        return fields


def conversation_key(space: str, conversation_id: str) -> str:
    return f"{space}:{conversation_id}"


def conversation_id(key: str) -> str:
    return key.partition(":")[2]


def name_of(key: str) -> str:
    """How its id begins (`Explicit.name`)."""
    given = conversation_id(key)
    hint, dot, _ = given.rpartition(".")
    return hint + dot if dot else given[: len(_UNNAMED)] if given.startswith(_UNNAMED) else ""


def owner_of(key: str) -> str:
    return key.partition(":")[0]


def clean_id(raw: object, source: str) -> str | None:
    """Return the id, or its hash where it is long or has other characters than `_ALPHABET`.

    Ids travel in headers and URLs, and are shown in logs and on dashboards.
    """
    if raw is None or raw == "":
        return None
    if not isinstance(raw, str):
        raise BadIdentity(f"{source} must be a string naming the conversation")
    size = len(raw.encode("utf-8", "surrogatepass"))
    if size > MAX_ID_BYTES:
        raise BadIdentity(f"{source} has {size} bytes; a conversation id has at most {MAX_ID_BYTES}")
    return hint_of(raw)


def hint_of(raw: object) -> str | None:
    """Like `clean_id`, but ignores a malformed value instead of raising."""
    if not isinstance(raw, str) or not raw:
        return None
    return (
        raw if _PLAIN.fullmatch(raw) else f"hash-{xxh3_128_hexdigest(raw.encode('utf-8', 'surrogatepass'))}"
    )


def explicit_identity(headers: Mapping[str, str], body: Mapping[str, Any]) -> Explicit:
    found, source, parent = _from_headers(headers)
    if found is None and (found := named_conversation(body)) is not None:
        source = "conversation"
    groups = _groups(body)
    hint = next(iter(groups), hint_of(headers.get(CORRELATION_HEADER))) or ""
    return Explicit(found, parent, source, "\0".join(groups), hint)


def _from_headers(headers: Mapping[str, str]) -> tuple[str | None, str, str | None]:
    parent = None
    for name in PARENT_HEADERS:
        parent = parent or clean_id(headers.get(name), name)
    for name in ID_HEADERS:
        found = clean_id(headers.get(name), name)
        if found is None:
            continue
        if name == "x-claude-code-session-id":
            found, agent_parent = _claude_code(found, headers)
            parent = parent or agent_parent
        return found, name, parent if parent != found else None
    token = headers.get(TOKEN_HEADER, "")
    if _GIVEN.fullmatch(token):
        return token, TOKEN_HEADER, parent
    return None, "", parent


def _claude_code(session: str, headers: Mapping[str, str]) -> tuple[str, str | None]:
    """Its sub-agents share the session id; each is a conversation of its own, below the one that began it."""
    agent = clean_id(headers.get(AGENT_HEADER), AGENT_HEADER)
    if agent is None:
        return session, None
    parent_agent = clean_id(headers.get(PARENT_AGENT_HEADER), PARENT_AGENT_HEADER)
    return f"{session}.{agent}", f"{session}.{parent_agent}" if parent_agent else session


def named_conversation(body: Mapping[str, Any]) -> str | None:
    """`conversation`: its id, or an object that has it."""
    conversation = body.get("conversation")
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
    return clean_id(conversation, "conversation")


def _groups(body: Mapping[str, Any]) -> list[str]:
    """`metadata.user_id` is Anthropic's; Claude Code's has its session inside."""
    metadata = body.get("metadata")
    fields = metadata if isinstance(metadata, Mapping) else {}
    sessions = (clean_id(body.get(name), name) for name in BODY_SESSIONS)
    said = *sessions, body.get("prompt_cache_key"), fields.get("session_id"), fields.get("user_id")
    return [group for raw in said if (group := hint_of(raw)) is not None]


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
    tips: dict[str, None] = field(default_factory=dict)  # of them those whose newest request ended here
    named: dict[str, dict[str, None]] = field(default_factory=dict)  # the same, by their names

    def came(self, conversation: str) -> None:
        self.tips[conversation] = None
        self.named.setdefault(name_of(conversation), {})[conversation] = None

    def left(self, conversation: str) -> None:
        if conversation in self.tips:
            del self.tips[conversation]
            alike = self.named[name := name_of(conversation)]
            del alike[conversation]
            if not alike:
                del self.named[name]


MOST_TIPS = 128  # conversations at one node among which a prompt's own is looked for, and as many of its name


class NodeTable:
    def __init__(self, capacity: int, per_conversation: int = 256) -> None:
        self._capacity = capacity
        self._per_conversation = per_conversation
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._tails: dict[bytes, dict[int, int]] = {}  # link -> length of a tail known there -> how many
        self._tips: dict[str, bytes] = {}  # newest request
        self._of: dict[str, deque[bytes]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def tip(self, conversation: str) -> bytes | None:
        return self._tips.get(conversation)

    def record(self, end: End, conversation: str) -> None:
        """A request of `conversation` ended here: its new tip."""
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
        if (before := self._nodes.get(self._tips.get(conversation, b""))) is not None:
            before.left(conversation)
        self._tips[conversation] = digest
        node.came(conversation)
        while len(self._nodes) > self._capacity:
            self._evict(next(iter(self._nodes)))

    def forget(self, conversation: str) -> None:
        self._tips.pop(conversation, None)
        for digest in self._of.pop(conversation, ()):
            self._leave(digest, conversation)

    def holders(self, digest: bytes, name: str = "") -> tuple[Holder, ...]:
        """Who was there first, whose a fork becomes, and the newest of those that are there now, of this name
        and of all: as many as a loop may look at, since whoever repeats a prompt under new ids may bring any
        number."""
        node = self._nodes.get(digest)
        if node is None:
            return ()
        self._nodes.move_to_end(digest)
        first = next(iter(node.conversations))
        of_name = islice(reversed(node.named.get(name, {})), MOST_TIPS)
        newest = dict.fromkeys((*of_name, *islice(reversed(node.tips), MOST_TIPS)))
        others = (Holder(one, True) for one in reversed(newest) if one != first)
        return Holder(first, first in node.tips), *others

    def tails(self, link: bytes) -> Sequence[int]:
        """Lengths of the tails known after a link, longest first."""
        return sorted(self._tails.get(link, ()), reverse=True)

    def find(self, chain: Chain, name: str = "") -> Found | None:
        for digest, size in self._known(chain):
            if holders := self.holders(digest, name):
                return Found(digest, size, holders)
        return None

    def find_of(self, chain: Chain, conversation: str) -> int:
        """Bytes of the longest prefix at which a request of this very conversation ended; 0 for none."""
        if conversation not in self._of:
            return 0
        for digest, size in self._known(chain):
            if conversation in self._nodes[digest].conversations:
                return size
        return 0

    def _known(self, chain: Chain) -> Iterator[tuple[bytes, int]]:
        """Digests of this chain's prefixes that are nodes here, the longest first, with their sizes."""
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
            mine = self._of[conversation]
            mine.remove(digest)
            if not mine:
                del self._of[conversation]
            if self._tips.get(conversation) == digest:
                del self._tips[conversation]
            self._leave(digest, conversation)

    def _leave(self, digest: bytes, conversation: str) -> None:
        node = self._nodes.get(digest)
        if node is None:
            return
        node.conversations.pop(conversation, None)
        node.left(conversation)
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


class How(StrEnum):
    EXPLICIT = "explicit"  # the request names its conversation
    CONTINUED = "continued"  # it goes on from the newest request of a conversation
    RETRIED = "retried"  # it repeats the newest request, which is not running any more
    FORKED = "forked"  # it goes on from an older point, or repeats a request that is still running
    NEW = "new"  # nothing of it is known


@dataclass(frozen=True, slots=True)
class Resolved:
    how: How
    conversation: str | None  # None: a new one is to be made
    parent: str | None  # whose decoder a fork starts on
    known_bytes: int  # of the prompt, up to the known prefix


def resolve_prefix(
    found: Found | None, end_digest: bytes, running: Callable[[str], bool], name: str = ""
) -> Resolved:
    """`running` says whether a conversation has a turn in flight. Of equals, one so named comes first."""
    if found is None:
        return Resolved(How.NEW, None, None, 0)
    tips = [holder.conversation for holder in found.holders if holder.tip]
    tips.sort(key=lambda key: not conversation_id(key).startswith(name))
    idle = [conversation for conversation in tips if not running(conversation)]
    if found.digest == end_digest:
        if idle:
            return Resolved(How.RETRIED, idle[0], None, found.size)
    elif tips:
        return Resolved(How.CONTINUED, (idle or tips)[0], None, found.size)
    return Resolved(How.FORKED, None, found.holders[0].conversation, found.size)
