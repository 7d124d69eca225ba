"""Routes of conversations and of stored answers, which outlive the turns that made them."""

import re
from typing import Any
from urllib.parse import parse_qs

from router.auth.keys import Key
from router.directory.api.client import DirectoryClient
from router.errors import JSON_TYPE, BadRequest, NotFound
from router.gateway.responses.stored_answers import Answers
from router.http import Request, Responder
from router.identity.conversation_ids import clean_id, conversation_id, conversation_key
from router.requests.body_parser import Api

CONVERSATIONS = "/v1/conversations"
RESPONSES = f"{Api.RESPONSES.target.decode()}/"
_PAGE = 50
_LARGEST_PAGE = 200


class StoredAnswerRoutes:
    """Returns and deletes stored answers: GET and DELETE of /v1/responses/{id}."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def get(self, key: Key, request: Request, responder: Responder) -> None:
        found = await self._answers.response(key.owner, request.path.removeprefix(RESPONSES))
        if found is None:
            raise NotFound("no such response is stored", code="response_not_found")
        responder.respond(200, found, [JSON_TYPE])

    async def delete(self, key: Key, request: Request, responder: Responder) -> None:
        name = request.path.removeprefix(RESPONSES)
        if not await self._answers.delete(key.owner, name):
            raise NotFound("no such response is stored", code="response_not_found")
        responder.respond_json({"id": name, "object": "response", "deleted": True})


class ConversationRoutes:
    """Lists, describes and ends conversations: /v1/conversations and /v1/conversations/{id}."""

    def __init__(self, directory: DirectoryClient, answers: Answers) -> None:
        self._directory, self._answers = directory, answers

    async def get(self, key: Key, request: Request, responder: Responder) -> None:
        found = await self._directory.describe(_conversation(key, request))
        if found is None:
            raise _not_found()
        responder.respond_json(_shown(found))

    async def delete(self, key: Key, request: Request, responder: Responder) -> None:
        conversation = _conversation(key, request)
        known = await self._directory.end(conversation, "deleted")
        had_history = await self._answers.end_conversation(key.owner, conversation_id(conversation), known)
        if not (known or had_history):
            raise _not_found()
        name = conversation_id(conversation)
        responder.respond_json({"id": name, "object": "conversation.deleted", "deleted": True})

    async def list(self, key: Key, request: Request, responder: Responder) -> None:
        """List the caller's conversations, the least recently used first; an admin gets those of all owners.

        The query's `after` is the `last_id` of the previous page.
        """
        query = {name: values[-1] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        limit = _limit(query.get("limit", str(_PAGE)))
        prefix = "" if key.admin else f"{key.owner}:"
        after = query.get("after", "")
        page = await self._directory.page(prefix, f"{prefix}{after}" if after else "", limit + 1)
        shown = [_shown(found, with_space=key.admin) for found in page[:limit]]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        more = len(page) > limit
        responder.respond_json(
            {"object": "list", "data": shown, "has_more": more, "first_id": first, "last_id": last}
        )


def _conversation(key: Key, request: Request) -> str:
    cleaned = clean_id(request.path.removeprefix(f"{CONVERSATIONS}/"), "the conversation id")
    if cleaned is None:
        raise _not_found()
    return conversation_key(key.owner, cleaned)


def _limit(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= _LARGEST_PAGE:
        raise BadRequest(f"limit must be a number from 1 to {_LARGEST_PAGE}", param="limit")
    return int(text)


def _shown(found: dict[str, Any], *, with_space: bool = False) -> dict[str, Any]:
    """Return a conversation as JSON fields. Its id begins with the owner only if `with_space`."""
    rest = {name: value for name, value in found.items() if name not in ("key", "parent")}
    show = str if with_space else conversation_id
    parent = found["parent"]
    return {
        "id": show(found["key"]),
        "object": "conversation",
        "parent": show(parent) if parent else None,
        **rest,
    }


def _not_found() -> NotFound:
    return NotFound("there is no such conversation, or it ended long ago", code="conversation_not_found")
