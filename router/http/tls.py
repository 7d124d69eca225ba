"""TLS of a server: a certificate whose files may change while it serves, and limits and counts of handshakes.

A connection is accepted in the clear and then upgraded by the event loop's own TLS, so that handshakes in
progress count as connections. asyncio's TLS server reports neither the start nor the failure of a handshake.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol, cast

from router.errors import GatewayConfigError
from router.http.limits import ServerLimits
from router.process import WatchedFiles, content_of

log = logging.getLogger("conserve.router.http.tls")

MAX_FILE_BYTES = 1 << 20


class TlsError(GatewayConfigError):
    """Raised for a certificate or key file that a server cannot use."""

    def __init__(self, which: Literal["cert", "key"], message: str) -> None:
        super().__init__(message)
        self.which = which


def load_context(cert: Path, key: Path, now: datetime) -> tuple[ssl.SSLContext, datetime]:
    """Return the context for a certificate and its key, and when the certificate expires.

    Raises TlsError for files with which handshakes would fail.
    """
    # Imported here, because gateways without TLS start sooner without it.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    def public(holder: object) -> bytes:
        key = holder.public_key()  # type: ignore[attr-defined]  # a certificate, or a key of any kind
        return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))

    chain = _content(cert, "cert")
    try:
        leaf = x509.load_pem_x509_certificates(chain)[0]
    except ValueError as error:
        raise TlsError("cert", f"{cert} does not begin with a certificate in PEM: {error}") from error
    if leaf.not_valid_after_utc <= now:
        ended = f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise TlsError("cert", f"{cert} expired on {ended}: renew it")
    if leaf.not_valid_before_utc > now:
        begins = f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise TlsError("cert", f"{cert} is not valid before {begins}: is this machine's clock right?")
    secret = _content(key, "key")
    try:
        private = load_pem_private_key(secret, None)
    except TypeError:
        raise TlsError(
            "key", f"{key} is encrypted, and nobody can enter its passphrase: store it without one"
        ) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError("key", f"{key} holds no private key in PEM") from error
    if public(private) != public(leaf):
        problem = f"{key} is not the key of the first certificate in {cert}"
        raise TlsError("key", f"{problem}: use the two files of one pair, the server's certificate first")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        raise TlsError("cert", f"OpenSSL does not accept {cert} with {key}: {error}") from error
    return context, leaf.not_valid_after_utc


def _content(file: Path, which: Literal["cert", "key"]) -> bytes:
    try:
        content = content_of(file, MAX_FILE_BYTES)
    except OSError as error:
        raise TlsError(which, f"{file} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise TlsError(which, f"{file} is longer than {MAX_FILE_BYTES >> 20} MiB")
    return content


class Certificate:
    """Certificate and key in two files, which are read again when they change.

    New connections use the new certificate. Files that cannot be used are tried again: a certificate may not
    be valid yet.
    """

    def __init__(self, cert: str, key: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._cert, self._key, self._now = Path(cert).expanduser(), Path(key).expanduser(), now
        self._watched = WatchedFiles(self._cert, self._key)
        self._watched.begin()
        self.stale = False
        """The files are missing or wrong, and the certificate that they held before is in use."""
        self.context, self.expires = load_context(self._cert, self._key, now())

    async def watch(self) -> None:
        """Read the files again whenever they have changed and are complete, until cancelled."""
        while True:
            await self._watched.due()
            try:
                await asyncio.to_thread(self._read)
            except RuntimeError as error:  # no thread can be started now: try again at the next check
                log.warning("certificate not read reason=%r", error)

    def _read(self) -> None:
        self._watched.begin()
        try:
            self.context, self.expires = load_context(self._cert, self._key, self._now())
        except Exception as error:  # noqa: BLE001 - after any failure the next good files must be read
            self.stale = True
            self._watched.ended(again=True)
            reason = error if isinstance(error, TlsError) else repr(error)
            until = f"{self.expires:%Y-%m-%d %H:%M}"
            log.error("certificate not read, the previous one stays in use until %s UTC: %s", until, reason)
            return
        self.stale = False
        self._watched.ended(again=False)
        log.info("certificate read file=%s expires=%s", self._cert, self.expires.isoformat())


class HandshakeHost(Protocol):
    """Interface of the server that a handshake uses."""

    limits: ServerLimits
    loop: asyncio.AbstractEventLoop

    def handshake_started(self, handshake: TlsHandshake) -> bool: ...

    def handshake_ended(self, handshake: TlsHandshake, outcome: str) -> None: ...


class TlsHandshake(asyncio.Protocol):
    """Accepted connection until its handshake is done; then it becomes a connection of the server."""

    sending = False

    def __init__(
        self, server: HandshakeHost, certificate: Certificate, connect: Callable[[], asyncio.Protocol]
    ) -> None:
        self._server = server
        self._certificate = certificate
        self._connect = connect
        self._received = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._server.handshake_started(self):
            self._task = self._server.loop.create_task(self._upgrade())
        else:
            self.abort("too_many")

    def data_received(self, data: bytes) -> None:
        self._received += data  # before the task has run for the first time

    def evict(self) -> None:
        """Abort this handshake, because a new connection needs its place."""
        self.abort("evicted")

    def abort(self, outcome: str = "failed") -> None:
        self._server.handshake_ended(self, outcome)
        self._transport.abort()

    async def _upgrade(self) -> None:
        outcome, limits = "failed", self._server.limits
        early = _EarlyData()
        # Runs when `start_tls` has taken the transport over, and before the handshake begins.
        self._server.loop.call_soon(_feed, self._transport, self._received)
        try:
            upgraded = await self._server.loop.start_tls(
                self._transport,
                early,
                self._certificate.context,
                server_side=True,
                ssl_handshake_timeout=limits.handshake_timeout_s,
                ssl_shutdown_timeout=limits.write_stall_s,  # until the client has read what was written
            )
            # A client that left, or was evicted, in the same moment leaves no usable transport.
            if upgraded is not None and upgraded.get_extra_info("ssl_object") is not None:
                outcome = "failed" if self._transport.is_closing() else "done"
        except ConnectionAbortedError:
            outcome = "timeout"
        except (OSError, RuntimeError):  # ssl.SSLError is an OSError; RuntimeError: closed before it began
            pass
        finally:
            self._server.handshake_ended(self, outcome)
        if outcome != "done" or upgraded is None:
            self._transport.abort()
            return
        connection = self._connect()
        upgraded.set_protocol(connection)
        connection.connection_made(upgraded)
        if early.data:
            connection.data_received(early.data)


class _EarlyData(asyncio.Protocol):
    """Receiver of data that arrives together with the last message of a handshake."""

    data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


def _feed(transport: asyncio.Transport, data: bytes) -> None:
    """Give the TLS protocol the data that was received before the protocol existed."""
    protocol = transport.get_protocol()
    while data and not isinstance(protocol, TlsHandshake):  # still there if the transport was closed
        buffer = memoryview(cast(asyncio.BufferedProtocol, protocol).get_buffer(len(data)))  # type: ignore[arg-type]
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        cast(asyncio.BufferedProtocol, protocol).buffer_updated(count)
        data = data[count:]
