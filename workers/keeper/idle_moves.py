"""Transfer of an idle conversation's KV from a keeper's engine to another decoder.

The keeper sends a request with the conversation's tokens and one output token to both engines. Its own engine
exports the KV as a prefiller does, and the other engine fetches it and retains it for the conversation.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import aiohttp

from kvtransfer.control.control_socket import ControlSocketError
from workers.engine.engine_key import KEY_HEADER
from workers.keeper.engine_status import EngineLink, SentKv, StatusStore

log = logging.getLogger("conserve.workers.idle_moves")

LIMIT_S = 60.0
# Priority above that of turns: little is computed, and conversations leave because turns wait here.
BEFORE_TURNS = -1


class KvSender:
    """Sender of idle conversations' KV from one engine to other engines."""

    def __init__(self, link: EngineLink, store: StatusStore, model: str, key: str) -> None:
        self._link, self._store = link, store
        self._model, self._headers = model, {KEY_HEADER.decode(): key}

    async def send(self, conversation: str, target: str) -> SentKv:
        """Send a conversation's KV to the decoder whose HTTP server is at `target` (host:port)."""
        info = self._store.report.info
        try:
            tokens, salt = await self._link.tokens(conversation)
            if info is None or not tokens:
                return SentKv(False)
            body: dict[str, Any] = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
            body["priority"] = BEFORE_TURNS
            body |= {"cache_salt": salt} if salt else {}
            transfer_id, (host, _, port) = uuid4().hex, info.transfer.rpartition(":")
            source = {"do_remote_decode": True, "transfer_id": transfer_id}
            fetch = {
                "do_remote_prefill": True,
                "transfer_id": transfer_id,
                "remote_host": host,
                "remote_port": int(port),
                "remote_epoch": info.epoch,
                "cached_tokens": len(tokens),
                "moves": True,
            }
            limit = aiohttp.ClientTimeout(total=LIMIT_S)
            async with aiohttp.ClientSession(headers=self._headers, timeout=limit) as http:
                cached = await asyncio.gather(
                    _ask(http, info.http, {**body, "kv_transfer_params": source}, {}),
                    _ask(http, target, {**body, "kv_transfer_params": fetch}, {"x-session-id": conversation}),
                )
        except (aiohttp.ClientError, TimeoutError, ControlSocketError, KeyError, ValueError) as error:
            log.warning("not sent conversation=%s to=%s reason=%r", conversation, target, error)
            return SentKv(False)
        whole = (len(tokens) - 1) // info.block_tokens * info.block_tokens
        return SentKv(True, max(0, whole - min(cached)))


async def _ask(
    http: aiohttp.ClientSession, address: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> int:
    """Send a request to an engine, and return how many tokens of the prompt the engine did not compute."""
    async with http.post(f"http://{address}/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise ValueError(f"{address} answers {answer.status}: {(await answer.text())[:300]}")
        usage = (await answer.json())["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
