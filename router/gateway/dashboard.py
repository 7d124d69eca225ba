"""Operators' dashboard: one static page at `/dashboard`, and the JSON that it requests every second.

It shows the conversations of all callers. Where keys are configured it therefore asks for a key of scope
`admin`, as the password of HTTP basic authentication, which browsers support.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import unquote

import orjson

from placement.engines import Role
from router.auth.keyring import Keyring
from router.auth.keys import Key
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import TimelineReport
from router.errors import (
    DirectoryUnavailable,
    MethodNotAllowed,
    NotFound,
    PasswordWanted,
    Unauthorized,
    excerpt,
)
from router.gateway.config import DEFAULT_CLASS, GatewayConfig, SloSettings
from router.http import Request, Responder

PREFIX = "/dashboard"
WINDOW_S = 120.0
_JSON = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


class DashboardRoutes:
    """Serves the dashboard's page and its JSON."""

    def __init__(self, config: GatewayConfig, directory: DirectoryClient, keys: Keyring) -> None:
        self._config = config
        self._directory = directory
        self._keys = keys
        self._page = files(__package__).joinpath("dashboard.html").read_bytes()
        self._page_headers = [(b"content-type", b"text/html; charset=utf-8"), _script_policy(self._page)]

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{PREFIX} takes GET", allow="GET")
        path = request.path.removeprefix(PREFIX).rstrip("/")
        if not path:
            responder.respond(200, self._page, self._page_headers)
        elif path == "/state":
            responder.respond(200, orjson.dumps(await self._state()), _JSON)
        elif path.startswith("/conversations/"):
            found = await self._conversation(unquote(path.removeprefix("/conversations/")))
            responder.respond(200, orjson.dumps(found), _JSON)
        else:
            raise NotFound(f"there is no {excerpt(request.path)}; the page is {PREFIX}")

    def caller(self, request: Request) -> Key | None:
        """Return the key of a caller who may see the dashboard; None if no keys are configured."""
        if not self._keys.configured:
            return None
        with suppress(Unauthorized):
            if (key := self._keys.find(_secret(request))).admin:
                return key
        raise PasswordWanted("the dashboard asks for a key of scope admin, as the password")

    async def _state(self) -> dict[str, Any]:
        engines = [self._engine(info.engine) for info in self._directory.engines.infos()]
        holding = [engine for engine in engines if engine["role"] != Role.PREFILL]
        capacity = sum(engine["kv"]["capacity"] for engine in holding)
        in_use = sum(engine["kv"]["live"] + engine["kv"]["reserved"] for engine in holding)
        notice = ""
        try:
            shown = await self._directory.timeline(WINDOW_S)
        except DirectoryUnavailable as error:
            shown = TimelineReport()
            notice = f"{error}; bound conversations continue"
        return {
            "fleet": self._config.fleet,
            "models": [model.name for model in self._config.models],
            "notice": notice,
            "now": shown.now,
            "live": sum(engine["conversations"] for engine in engines),
            "turns_running": sum(engine["running"] for engine in holding),
            "decoder_kv": in_use / capacity if capacity else 0.0,
            "slo": self._attainment({"met": shown.met, "missed": shown.missed}),
            "engines": sorted(engines, key=lambda engine: (engine["role"] != Role.PREFILL, engine["engine"])),
            "timelines": shown.conversations,
        }

    def _engine(self, name: str) -> dict[str, Any]:
        info, load = self._directory.engines.get(name), self._directory.engines.load(name)
        state = load.state
        assert info is not None
        return {
            "engine": info.engine,
            "tier": info.tier,
            "role": info.role,
            "epoch": info.epoch,
            "status": "silent" if load.suspect else "draining" if state.draining else "up",
            "conversations": load.conversations,
            "running": state.running,
            "waiting": state.waiting,
            "offline_running": state.offline_running,
            "kv": {
                "capacity": info.kv_tokens,
                "live": state.live_tokens,
                "reserved": max(0, load.kv_in_use - state.live_tokens),
                "parked": state.parked_tokens,
                "offline": state.offline_tokens,
                "host_used": state.host_used_tokens,
                "host_capacity": state.host_used_tokens + state.host_free_tokens,
            },
        }

    def _attainment(self, counts: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
        """Return, for each target of the default class, the share of answers that met it."""
        shown = []
        for objective, target in self._config.slos.get(DEFAULT_CLASS, SloSettings()).targets.items():
            met, missed = (counts[which].get(objective, 0) for which in ("met", "missed"))
            if met + missed:
                share = met / (met + missed)
                answers = {"target_s": target, "attained": share, "answers": met + missed}
                shown.append({"objective": objective, **answers})
        return shown

    async def _conversation(self, key: str) -> dict[str, Any]:
        found = await self._directory.describe(key)
        if found is None:
            raise NotFound("there is no such conversation, or it ended long ago")
        return found


def _secret(request: Request) -> str:
    scheme, _, given = (request.headers.text(b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _script_policy(page: bytes) -> tuple[bytes, bytes]:
    """Return the header by which browsers run only the page's own script, which they know by its hash."""
    hashes = [base64.b64encode(sha256(script).digest()).decode() for script in _SCRIPT.findall(page)]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    policy = f"default-src 'self'; style-src 'unsafe-inline'; script-src {allowed}"
    return b"content-security-policy", policy.encode()
