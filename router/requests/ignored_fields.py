"""Reports which unknown request fields were dropped: in a response header, a counter and the log."""

import logging
from collections.abc import Sequence
from urllib.parse import quote

from router.metrics import IGNORED_FIELDS

log = logging.getLogger("conserve.router.ignored_fields")

HEADER = b"x-conserve-ignored-fields"
MOST_LOGGED = 1_000  # pairs of key and field
_MOST_NAMED = 16  # fields in one header
_LONGEST_NAME = 64


class IgnoredFields:
    """Counts dropped fields, and logs each field once per key."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def record(self, key: str, path: str, names: Sequence[str]) -> bytes:
        """Count and log the dropped fields of a request to `path`; return a header value that lists them."""
        shown = [quote(name[:_LONGEST_NAME], errors="replace") for name in names[:_MOST_NAMED]]
        for name in shown:
            if (key, name) not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add((key, name))
                log.info("unknown field dropped key=%s path=%s field=%s", key, path, name)
        IGNORED_FIELDS.labels(path).inc(len(names))
        more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        return ", ".join((*shown, *more)).encode()
