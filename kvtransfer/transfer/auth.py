"""Both sides show that they know the fleet's secret, without sending it.

The nonces are fresh, so that a recorded answer is worth nothing; lengths are part of what is signed, so that
bytes cannot move from one field to another. What follows on the connection is not encrypted.
"""

import hmac
import secrets
from enum import Enum

NONCE_BYTES = 32
PROOF_BYTES = 32


class Side(Enum):
    """Signed too: one side's proof cannot be sent back to it as the other's."""

    CONSUMER = b"consumer"
    PRODUCER = b"producer"


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: Side, *said: bytes) -> bytes:
    text = b"".join(len(field).to_bytes(4, "big") + field for field in (side.value, *said))
    return hmac.digest(secret, text, "sha256")


def proves(given: bytes, secret: bytes, side: Side, *said: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, *said))
