"""TLS of a server: a certificate that may change while it serves, and handshakes, bounded in time and number.

A connection is accepted in the clear and then upgraded, so that handshakes under way are counted, and one
that fails says why: asyncio's own TLS server tells nobody of either.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from router.errors import GatewayConfigError
from router.http.limits import Crowd, ServerLimits, address_of
from router.process import WatchedFiles, content_of

log = logging.getLogger("conserve.router.http.tls")

MOST_BYTES = 1 << 20  # of either file
HANDSHAKE = 0x16  # the first byte of TLS
_TEXT = b'{"error":{"message":"this port speaks TLS: call it by https://","type":"invalid_request_error",'
_TEXT += b'"param":null,"code":"tls_wanted"}}'
NOT_TLS = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
NOT_TLS += b"content-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)


class TlsError(GatewayConfigError):
    """Files that no server can be started with."""

    def __init__(self, which: Literal["cert", "key"], said: str) -> None:
        super().__init__(said)
        self.which = which


def context_of(cert: Path, key: Path, now: datetime) -> tuple[ssl.SSLContext, datetime]:
    """And when the certificate expires. Whatever would fail at the first client is refused here."""
    chain = _content(cert, "cert")
    try:
        leaf = x509.load_pem_x509_certificates(chain)[0]
    except ValueError as wrong:
        raise TlsError("cert", f"{cert} does not begin with a certificate in PEM: {wrong}") from wrong
    if leaf.not_valid_after_utc <= now:
        ended = f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise TlsError("cert", f"{cert} has expired on {ended}: renew it")
    if leaf.not_valid_before_utc > now:
        begins = f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise TlsError("cert", f"{cert} is not valid before {begins}: is this machine's clock right?")
    secret = _content(key, "key")
    try:
        private = load_pem_private_key(secret, None)
    except TypeError:
        raise TlsError("key", f"{key} is encrypted, and there is nobody to ask: store it without") from None
    except (ValueError, UnsupportedAlgorithm) as wrong:
        raise TlsError("key", f"{key} holds no private key in PEM") from wrong
    if _public(private) != _public(leaf):
        said = f"{key} is not the key of the first certificate in {cert}"
        raise TlsError("key", f"{said}: the two are of one pair, and a chain begins with its own")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as wrong:  # ssl's own errors are OSErrors
        raise TlsError("cert", f"OpenSSL takes neither {cert} nor {key}: {wrong}") from wrong
    return context, leaf.not_valid_after_utc


def _content(file: Path, which: Literal["cert", "key"]) -> bytes:
    try:
        content = content_of(file, MOST_BYTES)
    except OSError as wrong:
        raise TlsError(which, f"{file} cannot be read: {wrong.strerror}") from wrong
    if len(content) > MOST_BYTES:
        raise TlsError(which, f"{file} is longer than {MOST_BYTES >> 20} MiB")
    return content


def _public(of: object) -> bytes:
    key = of.public_key()  # type: ignore[attr-defined]  # a certificate, or a key of any kind
    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


class Certificate:
    """Of two files, which are read again when they are others: new connections get what is in them then.
    Those that cannot be used are tried again: a certificate may not be valid yet."""

    def __init__(self, cert: str, key: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._cert, self._key, self._now = Path(cert).expanduser(), Path(key).expanduser(), now
        self._watched = WatchedFiles(self._cert, self._key)
        self._watched.begin()
        self.stale = False
        """The files are missing or wrong: what they held before is in use."""
        self.context, self.expires = context_of(self._cert, self._key, now())

    async def watch(self) -> None:
        """Until cancelled: use the files again when they have become others, and nobody writes to them."""
        while True:
            await self._watched.due()
            try:
                await asyncio.to_thread(self._read)
            except RuntimeError as wrong:  # no thread can be had now: at the next look
                log.warning("certificate not read reason=%r", wrong)

    def _read(self) -> None:
        self._watched.begin()
        try:
            self.context, self.expires = context_of(self._cert, self._key, self._now())
        except Exception as wrong:  # noqa: BLE001 - whatever it is: the next good one is to be read
            self.stale = True
            self._watched.ended(again=True)
            said = wrong if isinstance(wrong, TlsError) else repr(wrong)
            until = f"{self.expires:%Y-%m-%d %H:%M}"
            log.error("certificate not read, the one before stays in use until %s UTC: %s", until, said)
            return
        self.stale = False
        self._watched.ended(again=False)
        log.info("certificate read file=%s expires=%s", self._cert, self.expires.isoformat())


class Handshakes:
    """Those under way on a server's listener. What comes of one is a connection; what fails is counted."""

    def __init__(
        self,
        certificate: Certificate,
        limits: ServerLimits,
        connect: Callable[[asyncio.Transport], asyncio.Protocol],
        full: Callable[[], bool],
        idle: Crowd,
    ) -> None:
        """`connect` makes what a connection is spoken to by, of its transport below TLS; `full`: no more may
        begin; `idle`: those that make place for it, to which handshakes belong themselves."""
        self.loop = asyncio.get_running_loop()
        self.limit_s = limits.handshake_timeout_s
        self._certificate, self._connect, self._full = certificate, connect, full
        self._stall_s = limits.write_stall_s
        self._idle = idle
        self._begun: set[_Accepted] = set()
        self.ended: dict[str, int] = {}

    @property
    def under_way(self) -> int:
        return len(self._begun)

    def accepted(self) -> asyncio.Protocol:
        return _Accepted(self)

    def begin(self, one: _Accepted) -> bool:
        if self._full():
            self._count("too_many")
            return False
        self._begun.add(one)
        self._idle.add(one.address, one)
        return True

    def end(self, one: _Accepted, how: str) -> None:
        if one in self._begun:
            self._begun.discard(one)
            self._idle.discard(one.address, one)
            self._count(how)

    def close(self) -> None:
        for one in tuple(self._begun):
            one.cut("left")

    async def upgrade(self, transport: asyncio.Transport, began: bytes) -> str:
        """`began`: what has been read already. Says how it ended."""
        early = _Early()
        self.loop.call_soon(_feed, transport, began)  # after the upgrade takes over, before it shakes hands
        try:
            upgraded = await self.loop.start_tls(
                transport,
                early,
                self._certificate.context,
                server_side=True,
                ssl_handshake_timeout=self.limit_s,
                ssl_shutdown_timeout=self._stall_s,  # until what was written has been read
            )
        except ssl.SSLError:
            return "refused"
        except ConnectionAbortedError:
            return "late"
        except (OSError, RuntimeError):  # the latter of one that was closed in the same moment
            return "left"
        if upgraded is None or transport.is_closing() or upgraded.get_extra_info("ssl_object") is None:
            return "left"  # it was lost meanwhile, or gave way
        connection = self._connect(transport)
        upgraded.set_protocol(connection)
        connection.connection_made(upgraded)
        if early.data:
            connection.data_received(early.data)
        return "done"

    def _count(self, how: str) -> None:
        self.ended[how] = self.ended.get(how, 0) + 1


class _Accepted(asyncio.Protocol):
    """A connection until its first bytes: those say whether it speaks TLS."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._all = handshakes
        self.address = ""
        self._late: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = address_of(transport.get_extra_info("peername"))
        if not self._all.begin(self):
            self._transport.abort()
            return
        self._late = self._all.loop.call_later(self._all.limit_s, self.cut, "late")

    def data_received(self, data: bytes) -> None:
        if self._late is None:
            return
        self._late.cancel()
        self._late = None
        if data[0] != HANDSHAKE:
            self._transport.write(NOT_TLS)
            self._transport.close()
            self._all.end(self, "not_tls")
            return
        self._transport.pause_reading()
        self._task = self._all.loop.create_task(self._upgrade(data))

    def connection_lost(self, error: Exception | None) -> None:
        self.cut("left")

    @property
    def sending(self) -> bool:
        return False

    def give_way(self) -> None:
        self.cut("gave_way")

    def cut(self, how: str) -> None:
        if self._late is not None:
            self._late.cancel()
        self._transport.abort()
        self._all.end(self, how)

    async def _upgrade(self, began: bytes) -> None:
        how = "left"
        try:
            if not self._transport.is_closing():
                how = await self._all.upgrade(self._transport, began)
        finally:
            self._all.end(self, how)


class _Early(asyncio.Protocol):
    """Told of what comes with a handshake's last message, and of the end of one that failed."""

    data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


def _feed(transport: asyncio.Transport, data: bytes) -> None:
    protocol = cast(asyncio.BufferedProtocol, transport.get_protocol())
    while data and not isinstance(protocol, _Accepted):  # it was closed before the upgrade began
        buffer = memoryview(protocol.get_buffer(len(data)))  # type: ignore[arg-type]
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]
