"""Reads the conversation id that a request states in a header or in its body.

The lists of header names below are in order of precedence. An id is valid within the owner of the API key. A
session id or a cache key in the body may stand for a whole application. It therefore names a group, not a
conversation: prompts of different groups never match, and within a group the prompt decides
(`node_table.py`). A correlation id, which proxies put on each request, only decides between equal matches.
The gateway has already replaced a `previous_response_id` by the whole input.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import uuid4

from xxhash import xxh3_128_hexdigest

from router.errors import BadIdentity

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
PARENT_HEADERS = (
    "x-parent-conversation-id",
    "x-parent-session-id",
    "x-dynamo-parent-session-id",
    "x-codex-parent-thread-id",
)
TOKEN_HEADER = (
    "x-session-token"  # clients of llm-d return the token that they got; its own tokens name engines
)
CORRELATION_HEADER = "x-correlation-id"
AGENT_HEADER = "x-claude-code-agent-id"
PARENT_AGENT_HEADER = "x-claude-code-parent-agent-id"
_BODY_SESSIONS = ("session_id", "conversation_id")  # an application may send the same value in all requests
_ALL_HEADERS = frozenset((*ID_HEADERS, *PARENT_HEADERS, TOKEN_HEADER))
_GROUP_FIELDS = frozenset((*_BODY_SESSIONS, "prompt_cache_key", "metadata"))

MAX_ID_BYTES = 512
_MAX_HINT_LENGTH = 64  # in the id of a conversation that is named after a hint
_DEFAULT_PREFIX = "c-"
_ALPHABET = r"[A-Za-z0-9._~:/@+=,|#-]"  # nothing that has a meaning in HTML, a shell or a log line
_PLAIN = re.compile(f"{_ALPHABET}{{1,128}}")
_GENERATED = re.compile(f"c-[0-9a-f]{{32}}|{_ALPHABET}{{1,64}}[.][0-9a-f]{{12}}")  # by `new_id`


@dataclass(frozen=True, slots=True)
class ExplicitIdentity:
    """Ids with which a request itself names its conversation. They are safe in headers and URLs."""

    id: str | None
    parent: str | None
    group: str = ""  # prompts of different groups never match
    hint: str = ""  # names the conversation if the request has no id

    @property
    def id_prefix(self) -> str:
        """Return the beginning of a generated id: the request's hint, or a fixed prefix if it has no hint."""
        return f"{self.hint[:_MAX_HINT_LENGTH]}." if self.hint else _DEFAULT_PREFIX

    def new_id(self) -> str:
        """Generate an id for a new conversation."""
        unique = uuid4().hex
        return f"{self.id_prefix}{unique[:12] if self.hint else unique}"


def namespace(api_key: str) -> str:
    """Return a hash of an API key that stands for its owner, for keys without a named owner."""
    return sha256(api_key.encode()).hexdigest()[:16]


def conversation_key(space: str, conversation_id: str) -> str:
    """Return the name of a conversation inside the fleet, made of its owner and its id."""
    return f"{space}:{conversation_id}"


def conversation_id(key: str) -> str:
    """Return the id in a conversation key."""
    return key.partition(":")[2]


def id_prefix_of(key: str) -> str:
    """Return the `id_prefix` of a generated conversation id; empty for most ids that a client chose."""
    id = conversation_id(key)
    hint, dot, _ = id.rpartition(".")
    if dot:
        return hint + dot
    return _DEFAULT_PREFIX if id.startswith(_DEFAULT_PREFIX) else ""


def clean_id(raw: object, source: str) -> str | None:
    """Return a client's id in a form that is safe in headers, URLs and logs; None for an empty id.

    An id over 128 characters or with unusual characters is replaced by its hash. A value that is no text, or
    is too long, raises BadIdentity. `source` names the header or field in the error.
    """
    if raw is None or raw == "":
        return None
    if not isinstance(raw, str):
        raise BadIdentity(f"{source} must be a string naming the conversation")
    size = len(raw.encode("utf-8", "surrogatepass"))
    if size > MAX_ID_BYTES:
        raise BadIdentity(f"{source} has {size} bytes; a conversation id has at most {MAX_ID_BYTES}")
    return normalized_hint(raw)


def normalized_hint(raw: object) -> str | None:
    """Like `clean_id`, but ignore a malformed value instead of raising."""
    if not isinstance(raw, str) or not raw:
        return None
    if _PLAIN.fullmatch(raw):
        return raw
    return f"hash-{xxh3_128_hexdigest(raw.encode('utf-8', 'surrogatepass'))}"


def explicit_identity(headers: Mapping[str, str], body: Mapping[str, Any]) -> ExplicitIdentity:
    """Return what a request's headers and body say about its conversation. Headers take precedence."""
    id, parent = _from_headers(headers)
    if id is None:
        id = named_conversation(body)
    groups = _groups(body)
    hint = next(iter(groups), normalized_hint(headers.get(CORRELATION_HEADER))) or ""
    return ExplicitIdentity(id, parent, "\0".join(groups), hint)


def _from_headers(headers: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the ids that the headers give for the conversation and for its parent."""
    if headers.keys().isdisjoint(_ALL_HEADERS):
        return None, None
    parent = None
    for name in PARENT_HEADERS:
        parent = parent or clean_id(headers.get(name), name)
    for name in ID_HEADERS:
        id = clean_id(headers.get(name), name)
        if id is None:
            continue
        if name == "x-claude-code-session-id":
            id, agent_parent = _claude_code_agent(id, headers)
            parent = parent or agent_parent
        return id, parent if parent != id else None
    token = headers.get(TOKEN_HEADER, "")
    if _GENERATED.fullmatch(token):
        return token, parent
    return None, parent


def _claude_code_agent(session: str, headers: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the conversation ids of a Claude Code agent and of its parent, which share a session id."""
    agent = clean_id(headers.get(AGENT_HEADER), AGENT_HEADER)
    if agent is None:
        return session, None
    parent_agent = clean_id(headers.get(PARENT_AGENT_HEADER), PARENT_AGENT_HEADER)
    return f"{session}.{agent}", f"{session}.{parent_agent}" if parent_agent else session


def named_conversation(body: Mapping[str, Any]) -> str | None:
    """Return the id in the body's `conversation` field, which is a string or an object with an id."""
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    return clean_id(conversation, "conversation")


def _groups(body: Mapping[str, Any]) -> list[str]:
    """Return a body's session ids and cache key. Claude Code puts its session into `metadata.user_id`."""
    if body.keys().isdisjoint(_GROUP_FIELDS):
        return []
    metadata = body.get("metadata")
    fields = metadata if isinstance(metadata, dict) else {}
    sessions = (clean_id(body.get(name), name) for name in _BODY_SESSIONS)
    values = *sessions, body.get("prompt_cache_key"), fields.get("session_id"), fields.get("user_id")
    return [group for value in values if (group := normalized_hint(value)) is not None]
