"""What the server and the upstream pool allow, each with a bound. Seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_connections: int = 8192
    max_url_bytes: int = 8 * KIB
    max_headers: int = 100
    max_head_bytes: int = 64 * KIB
    max_body_bytes: int = 32 * MIB
    head_timeout_s: float = 10.0
    """From a request's first byte to the end of its head."""
    body_timeout_s: float = 30.0
    """Longest silence inside a body that a handler waits for."""
    idle_timeout_s: float = 75.0
    """A kept-alive connection without a request."""
    write_stall_s: float = 60.0
    """A client that leaves ``write_high_bytes`` unread for this long is cut off."""
    write_high_bytes: int = 256 * KIB
    write_low_bytes: int = 64 * KIB
    read_high_bytes: int = 256 * KIB
    """Body bytes held for a handler that is not reading; beyond it the client is paused."""
    linger_s: float = 2.0
    """After a refusal the rest of the request is read and dropped this long, so that the answer arrives."""


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    max_connections: int = 2048
    """Connections to one endpoint."""
    acquire_timeout_s: float = 5.0
    """Longest wait for one of them."""
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    """Without streaming, an engine's first byte comes after its last token."""
    chunk_timeout_s: float = 120.0
    idle_timeout_s: float = 4.0
    """Below uvicorn's five seconds, so that we close an idle connection before the engine does."""
    max_head_bytes: int = 64 * KIB
