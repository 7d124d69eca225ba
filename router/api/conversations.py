"""GET and DELETE /v1/conversations[/{id}]: what the directory knows of a caller's conversations."""

from typing import Any
from urllib.parse import parse_qs

import orjson

from router.api.callers import Caller
from router.directory.client import DirectoryClient, DirectoryUnreachable
from router.errors import BadRequest, NotFound, Unavailable
from router.http import Request, Responder
from router.identity.explicit import BadIdentity, clean_id, conversation_id, conversation_key

PREFIX = "/v1/conversations"
_JSON = (b"content-type", b"application/json")
_PAGE = 50
_MAX_PAGE = 200


class ConversationRoutes:
    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory

    async def get(self, caller: Caller, request: Request, responder: Responder) -> None:
        key = _key(caller, request)
        try:
            found = await self._directory.describe(key)
        except DirectoryUnreachable as wrong:
            raise Unavailable(str(wrong), retry_after_s=2.0) from wrong
        if found is None:
            raise _unknown()
        responder.respond(200, orjson.dumps(_shown(found)), [_JSON])

    async def delete(self, caller: Caller, request: Request, responder: Responder) -> None:
        key = _key(caller, request)
        try:
            known = await self._directory.end(key, "deleted")
        except DirectoryUnreachable as wrong:
            raise Unavailable(str(wrong), retry_after_s=2.0) from wrong
        if not known:
            raise _unknown()
        gone = {"id": conversation_id(key), "object": "conversation.deleted", "deleted": True}
        responder.respond(200, orjson.dumps(gone), [_JSON])

    async def list(self, caller: Caller, request: Request, responder: Responder) -> None:
        """Least recently used first; `after` is the `last_id` of the page before. An admin sees all keys."""
        query = {name: values[-1] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        limit = _limit(query.get("limit", str(_PAGE)))
        prefix = "" if caller.admin else f"{caller.space}:"
        after = query.get("after", "")
        try:
            page = await self._directory.page(prefix, f"{prefix}{after}" if after else "", limit + 1)
        except DirectoryUnreachable as wrong:
            raise Unavailable(str(wrong), retry_after_s=2.0) from wrong
        shown = [_shown(found, with_space=caller.admin) for found in page[:limit]]
        answer = {
            "object": "list",
            "data": shown,
            "has_more": len(page) > limit,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }
        responder.respond(200, orjson.dumps(answer), [_JSON])


def _key(caller: Caller, request: Request) -> str:
    raw = request.path.removeprefix(PREFIX + "/")
    try:
        cleaned = clean_id(raw, "the conversation id")
    except BadIdentity as wrong:
        raise BadRequest(str(wrong)) from None
    if cleaned is None:
        raise _unknown()
    return conversation_key(caller.space, cleaned)


def _limit(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MAX_PAGE:
        raise BadRequest(f"limit must be a number from 1 to {_MAX_PAGE}", param="limit")
    return int(text)


def _shown(found: dict[str, Any], *, with_space: bool = False) -> dict[str, Any]:
    """Keys hold the caller's name space; only an admin needs to see it."""
    rest = {name: value for name, value in found.items() if name not in ("key", "parent")}
    show = str if with_space else conversation_id
    parent = found["parent"]
    return {
        "id": show(found["key"]),
        "object": "conversation",
        "parent": show(parent) if parent else None,
        **rest,
    }


def _unknown() -> NotFound:
    return NotFound("there is no such conversation, or it ended long ago", code="conversation_not_found")
