"""Holds the API keys that a gateway accepts: those in the fleet file, and those in the keys file."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from router import metrics
from router.auth.keys import DefaultLimits, Key, Limits, anonymous_key, hash_secret
from router.auth.keys_file import KeysFileError, parse_keys, read_keys_file
from router.errors import Unauthorized
from router.http import Headers
from router.process import WatchedFiles

log = logging.getLogger("conserve.router.keys")

_DEFAULT_LIMITS = DefaultLimits()


class Keyring:
    """The keys of a fleet, as this gateway last read them.

    A changed keys file is parsed in a thread. If it has an error, the keys read before stay in use, and the
    log and `conserve_keys_stale` say so. Where only admins have keys, other callers need none.
    """

    def __init__(
        self,
        inline: Sequence[Key],
        file: str | None,
        limits: Limits = _DEFAULT_LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Accept the fleet file's `inline` keys and those of `file`; `limits` are for keys that set none."""
        self.configured = bool(inline) or file is not None
        self.anonymous = file is None and all(key.admin for key in inline)
        self._inline, self._limits, self._clock = inline, limits, clock
        self._use(inline)
        self._file = Path(file).expanduser() if file is not None else None
        if self._file is not None:
            self._watched = WatchedFiles(self._file)
            self._load(self._file)

    def __len__(self) -> int:
        return len(self._by_hash)

    def authenticate(self, headers: Headers) -> Key:
        """Return the key of a request, or raise Unauthorized."""
        scheme, _, token = (headers.text(b"authorization") or "").partition(" ")
        bearer = scheme.lower() == "bearer"
        return self.find(token.strip() if bearer else headers.text(b"x-api-key") or "")

    def find(self, secret: str) -> Key:
        """Return the key that has this secret, or raise Unauthorized.

        The look-up compares hashes only, so that its duration tells nothing about the secrets in use.
        """
        key = self._by_hash.get(hash_secret(secret))
        if key is None and self.anonymous:
            key = anonymous_key(secret, self._limits)
        if key is None and not secret:
            raise Unauthorized("the API key is missing; send it as `Authorization: Bearer KEY`")
        if key is None:
            raise Unauthorized("the API key is not known to this fleet")
        if key.expires is not None and key.expires <= self._clock():
            raise Unauthorized("the API key has expired; ask for another", code="api_key_expired")
        return key

    def limits_of(self, id: str) -> Limits | None:
        """Return the limits of the key with this id, or None if the id is unknown here."""
        if (key := self._by_id.get(id)) is not None:
            return key.limits
        return self._limits if self.anonymous else None

    async def watch(self) -> None:
        """Read the keys file again whenever it changes, until cancelled."""
        while self._file is not None:
            await self._watched.due()
            try:
                await asyncio.to_thread(self._load, self._file)
            except RuntimeError as error:  # no thread could be started; the next look tries again
                log.warning("keys not read file=%s reason=%r", self._file, error)

    def _load(self, file: Path) -> None:
        self._watched.begin()
        retry = True  # unless the content itself is wrong: other failures may pass
        try:
            content = read_keys_file(file)
            keys = parse_keys(content, str(file), self._inline)
            self._use((*self._inline, *keys))  # a key in both: the keys file's entry counts
            retry = False
        except Exception as error:  # noqa: BLE001  any failure leaves the keys as they are
            known = isinstance(error, KeysFileError)
            retry = not known or isinstance(error.__cause__, OSError)
            text = str(error) if known else f"{file}:1: cannot be read: {error!r}"
            metrics.KEYS_STALE.set(1)
            log.error("keys not read, earlier keys stay in use keys=%d\n%s", len(self), text)
        else:
            metrics.KEYS_STALE.set(0)
            log.info("keys read file=%s keys=%d", file, len(keys))
        finally:
            self._watched.ended(again=retry)

    def _use(self, keys: Sequence[Key]) -> None:
        complete = [replace(key, limits=key.limits.with_defaults(self._limits)) for key in keys]
        self._by_hash = {key.hash: key for key in complete}
        self._by_id = {key.id: key for key in complete}
