"""Groups of owners that share cached prefixes in the engines."""

from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any

EVERYBODY = "*"
_SHARED_GROUP = "*shared"  # no owner has this name


class PrefixGroups:
    """Chooses the cache salt of a request.

    vLLM finds a cached block only under the salt it was computed with. By default every owner has its own
    salt: with a common salt, an owner could tell from latencies what others have asked.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        """Group the owners in `shared`, who share prefixes with each other; it may contain EVERYBODY."""
        self._shared = frozenset(shared)

    def fields(self, space: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields to replace in an owner's request: its cache salt, and None for its session id."""
        fields: dict[str, Any] = {}
        group = space
        if EVERYBODY in self._shared:
            group = ""
        elif space in self._shared:
            group = _SHARED_GROUP
        if own := body.get("cache_salt"):  # a client's own salt separates requests within the group
            fields["cache_salt"] = sha256(f"{group}\0{own}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        elif group:
            fields["cache_salt"] = group
        if "session_id" in body:
            fields["session_id"] = None  # it would override the header with the conversation's scoped id
        return fields
