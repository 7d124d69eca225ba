"""Who calls: API keys, and the name space that each gives its caller's conversation ids."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from router.config import GatewayConfig
from router.errors import Unauthorized
from router.http import Headers
from router.identity.explicit import namespace

_REMEMBERED_KEYS = 1024


@dataclass(frozen=True, slots=True)
class Caller:
    space: str
    admin: bool


class Callers:
    def __init__(self, config: GatewayConfig) -> None:
        self._admins = _digests(config.admin_keys)
        self._allowed = _digests(config.api_keys) | self._admins if config.api_keys else None

        self._of_key = lru_cache(_REMEMBERED_KEYS)(self._caller)

    def caller(self, headers: Headers) -> Caller:
        """Without a list of keys any may come, and only scopes ids. Keys are compared by their digests."""
        scheme, _, given = (headers.text(b"authorization") or "").partition(" ")
        return self._of_key(given.strip() if scheme.lower() == "bearer" else headers.text(b"x-api-key") or "")

    def _caller(self, key: str) -> Caller:
        digest = sha256(key.encode()).digest()
        if self._allowed is not None and digest not in self._allowed:
            raise Unauthorized(
                "the API key is missing or not known; send it as `Authorization: Bearer KEY`"
                if not key
                else "the API key is not known to this fleet"
            )
        return Caller(namespace(key), digest in self._admins)

    def is_admin(self, key: str) -> bool:
        return sha256(key.encode()).digest() in self._admins


def _digests(keys: tuple[str, ...]) -> frozenset[bytes]:
    return frozenset(sha256(key.encode()).digest() for key in keys)
