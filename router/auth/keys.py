"""Defines API keys: what a key allows, and its limits.

Only the caller has the secret of a key; the keys file and the gateways have its hash. Conversations, files
and batch jobs belong to the key's owner, so that another key of the same owner finds them.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from router.errors import Forbidden
from router.identity.conversation_ids import namespace
from router.settings import SETTINGS, Count, Gib, Share


class Scope(StrEnum):
    """Permissions of a key."""

    SERVE = "serve"  # use the models; read and end what belongs to the owner
    READ = "read"  # read what belongs to the owner, and the metrics
    ADMIN = "admin"  # read what belongs to anybody: all conversations, the dashboard, the metrics


def hash_secret(secret: str) -> str:
    """Return the hash of a secret, as the keys file stores it.

    Secrets are 256 random bits and cannot be guessed. A slow or salted hash, which passwords need, would cost
    every request and protect nothing more.
    """
    return f"sha256:{sha256(secret.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _timestamp(value: object) -> object:
    """Convert an ISO 8601 date or time to seconds since 1970; the zone is UTC if none is given."""
    if not isinstance(value, str):
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("a day as in 2027-01-31, or a time as in 2027-01-31T12:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
_STRICT = ConfigDict(extra="forbid")


class StructuredOutputs(StrEnum):
    """Permission of a key to ask for answers that follow a grammar or schema, which engines must compile."""

    ALLOW = "allow"
    REFUSE = "refuse"


_Tokens = Annotated[
    Count | None, Field(description="Computed tokens: prompt tokens that no cache held, and answer tokens.")
]
_Turns = Annotated[Count | None, Field(description="Concurrent turns.")]
_QueueShare = Annotated[
    Share | None, Field(description="Share of the queue for first turns that the key's owner may fill.")
]
_Stored = Annotated[Gib | None, Field(le=1 << 30, description="Size of all files of the key's owner.")]
_Batches = Annotated[int | None, Field(ge=0, le=10**12, description="Unfinished batches of the key's owner.")]
_Grammars = Annotated[
    Count | None,
    Field(
        description="New grammars for engines to compile: schemas, expressions, tools that must be called. "
        "Each gateway process counts by itself."
    ),
]
_Structured = Annotated[
    StructuredOutputs | None,
    Field(description="`refuse`: no request, and no line of a batch, may ask for a grammar or schema."),
]


@dataclass(frozen=True, config=_STRICT)
class Limits:
    """Limits of a key. None means the fleet file's default; if that is None too, there is no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: _Tokens = None
    turns: _Turns = None
    waiting_share: _QueueShare = None
    stored_gib: _Stored = None
    batches: _Batches = None
    grammars_per_minute: _Grammars = None
    structured_outputs: _Structured = None

    def with_defaults(self, defaults: "Limits") -> "Limits":
        """Return these limits, with `defaults` for the limits that are not set."""
        return Limits(**{**vars(defaults), **self.given()})

    @property
    def metered(self) -> bool:
        """Return whether a gateway has to count the usage of a key with these limits."""
        counted = self.requests_per_minute, self.tokens_per_minute, self.turns, self.grammars_per_minute
        return any(counted)

    def given(self) -> dict[str, Any]:
        """Return the limits that are set, by name."""
        return {name: limit for name, limit in vars(self).items() if limit is not None}


@dataclass(frozen=True, config=SETTINGS)
class DefaultLimits(Limits):
    """The fleet's values for limits that a key does not set. None means no limit."""

    waiting_share: _QueueShare = 0.5
    stored_gib: _Stored = 100.0
    batches: _Batches = 100
    grammars_per_minute: _Grammars = 120
    structured_outputs: _Structured = StructuredOutputs.ALLOW


@dataclass(frozen=True, config=_STRICT)
class Key:
    """One entry of the keys file. Every request is made in the name of a key."""

    id: _Name
    owner: _Name
    hash: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]  # empty for an anonymous caller
    scopes: frozenset[Scope] = frozenset({Scope.SERVE})
    models: tuple[str, ...] = ()  # empty for all models
    expires: Annotated[float | None, BeforeValidator(_timestamp)] = None
    limits: Limits = Limits()

    @property
    def admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def check_method(self, method: str) -> None:
        """Refuse an HTTP method that none of the key's scopes allows."""
        allowed = self.scopes if method in ("GET", "HEAD") else self.scopes & {Scope.SERVE}
        if not allowed:
            raise Forbidden(f"{method} needs an API key with the scope serve", code="scope_missing")

    def check_may_read_metrics(self) -> None:
        if not self.scopes & {Scope.READ, Scope.ADMIN}:
            raise Forbidden("the metrics need an API key with the scope read or admin", code="scope_missing")


def inline_keys(api_keys: Sequence[str], admin_keys: Sequence[str]) -> tuple[Key, ...]:
    """Return the keys whose secrets are in the fleet file itself. Each is the only key of its owner."""
    scopes = {secret: frozenset({Scope.SERVE}) for secret in api_keys}
    scopes |= {secret: frozenset({Scope.SERVE, Scope.ADMIN}) for secret in admin_keys}
    owners = {secret: namespace(secret) for secret in scopes}
    return tuple(Key(owners[one], owners[one], hash_secret(one), scopes[one]) for one in scopes)


@lru_cache(1024)
def anonymous_key(secret: str, limits: Limits) -> Key:
    """Return a key for a caller who needs none. Callers with the same secret count as one owner."""
    owner = namespace(secret)
    return Key(owner, owner, "", limits=limits)
