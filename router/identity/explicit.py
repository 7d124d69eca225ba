"""Conversation ids that a request carries itself, in headers or in its body.

The order is the order of precedence. `previous_response_id` is not an id but a pointer to a conversation;
it is followed in `identify.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from xxhash import xxh3_128_hexdigest

ID_HEADERS = (
    "x-conversation-id",
    "x-session-id",
    "x-session-affinity",
    "x-correlation-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-litellm-session-id",
    "x-smg-routing-key",
    "x-flow-conversation-id",
)
PARENT_HEADERS = ("x-parent-conversation-id", "x-dynamo-parent-session-id")
AGENT_HEADER = "x-claude-code-agent-id"
PARENT_AGENT_HEADER = "x-claude-code-parent-agent-id"
FINAL_HEADER = "x-conversation-final"

MAX_ID_BYTES = 512
_PLAIN = re.compile(r"[!-~]+")
_TRUE = frozenset({"1", "true", "yes"})


class BadIdentity(ValueError):
    """An id that cannot name a conversation; the text says what to send instead."""


@dataclass(frozen=True, slots=True)
class Explicit:
    """What a request says about its own identity; ids are already safe for a header and a URL."""

    id: str | None
    parent: str | None
    source: str  # the header or body field the id came from, empty without one
    previous_response: str | None


def namespace(api_key: str) -> str:
    """Clients choose their ids, so that every id is scoped by the key it came with."""
    return sha256(api_key.encode()).hexdigest()[:16]


def conversation_key(space: str, conversation_id: str) -> str:
    return f"{space}:{conversation_id}"


def conversation_id(key: str) -> str:
    return key.partition(":")[2]


def clean_id(raw: object, source: str) -> str | None:
    """The id as visible ASCII. Others are replaced by their hash: ids travel in headers and URLs."""
    if raw is None or raw == "":
        return None
    if not isinstance(raw, str):
        raise BadIdentity(f"{source} must be a string naming the conversation")
    encoded = raw.encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_ID_BYTES:
        raise BadIdentity(f"{source} has {len(encoded)} bytes; a conversation id has at most {MAX_ID_BYTES}")
    return raw if _PLAIN.fullmatch(raw) else f"hash-{xxh3_128_hexdigest(encoded)}"


def is_final(headers: Mapping[str, str]) -> bool:
    """Whether the client says that this turn is the conversation's last."""
    return headers.get(FINAL_HEADER, "").strip().lower() in _TRUE


def explicit(headers: Mapping[str, str], body: Mapping[str, Any]) -> Explicit:
    found, source, parent = _from_headers(headers)
    previous = body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise BadIdentity("previous_response_id must be a string")
    if found is None and (pair := _from_body(body, before_previous=True)):
        found, source = pair
    if found is None and not previous and (pair := _from_body(body, before_previous=False)):
        found, source = pair
    return Explicit(found, parent, source, previous or None)


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
    return None, "", parent


def _claude_code(session: str, headers: Mapping[str, str]) -> tuple[str, str | None]:
    """Its sub-agents share the session id; each is a conversation of its own, below the one that began it."""
    agent = clean_id(headers.get(AGENT_HEADER), AGENT_HEADER)
    if agent is None:
        return session, None
    parent_agent = clean_id(headers.get(PARENT_AGENT_HEADER), PARENT_AGENT_HEADER)
    return f"{session}.{agent}", f"{session}.{parent_agent}" if parent_agent else session


def _from_body(body: Mapping[str, Any], before_previous: bool) -> tuple[str, str] | None:
    fields: tuple[tuple[str, object], ...]
    if before_previous:
        conversation = body.get("conversation")
        if isinstance(conversation, Mapping):
            conversation = conversation.get("id")
        fields = (("session_id", body.get("session_id")), ("conversation", conversation))
    else:
        metadata = body.get("metadata")
        session = metadata.get("session_id") if isinstance(metadata, Mapping) else None
        fields = (("prompt_cache_key", body.get("prompt_cache_key")), ("metadata.session_id", session))
    for source, raw in fields:
        found = clean_id(raw, source)
        if found is not None:
            return found, source
    return None
