"""Keys of a fleet: one for each purpose, derived from the token of its Ray cluster.

Every node of a cluster has the token, or it were none of its nodes; so nothing secret is handed to actors,
whose arguments Ray keeps and sends about. An actor derives on its node what it needs, and gives each process
that it starts the keys of that process's work.
"""

import hmac
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from deploy.errors import LifecycleError

TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DEFAULT_PATH = "~/.ray/auth_token"  # Ray's
LEAST_CHARACTERS = 16
_NONCE_BYTES = 12


class TokenError(LifecycleError):
    """There is no token of a Ray cluster, or none that keeps anybody out."""


class Purpose(StrEnum):
    DIRECTORY = "directory"  # asked by gateways, the batch process and commands
    KEEPERS = "keepers"  # asked by the directory, the autoscaler and commands
    ENGINES = "engines"  # asked by gateways, the batch process and their keepers
    TRANSFER = "transfer"  # between engines
    BATCH = "batch"  # the batch process, asked by gateways
    ACTORS = "actors"  # what Ray keeps for actors


class FleetKeys:
    def __init__(self, token: str, fleet: str) -> None:
        if len(token) < LEAST_CHARACTERS:
            raise TokenError(f"the Ray cluster's token is shorter than {LEAST_CHARACTERS} characters")
        self._root = hmac.digest(token.encode(), f"conserve fleet {fleet}".encode(), "sha256")

    @classmethod
    def here(cls, fleet: str) -> Self:
        """In a process that belongs to the cluster, or has its settings."""
        return cls(token(os.environ), fleet)

    def of(self, purpose: Purpose) -> str:
        return hmac.digest(self._root, purpose.encode(), "sha256").hex()

    def seal(self, text: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher().encrypt(nonce, text, None)

    def unseal(self, sealed: bytes) -> bytes:
        try:
            return self._cipher().decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except InvalidTag:
            raise TokenError("this node has another token than the one that started the fleet") from None

    def _cipher(self) -> AESGCM:
        return AESGCM(bytes.fromhex(self.of(Purpose.ACTORS)))


def token(environ: Mapping[str, str]) -> str:
    """Where Ray looks for it, in its order."""
    if given := environ.get(TOKEN, "").strip():
        return given
    file = Path(environ.get(TOKEN_PATH) or DEFAULT_PATH).expanduser()
    try:
        return file.read_text().strip()
    except OSError as error:
        raise TokenError(
            f"no token of a Ray cluster: {TOKEN} is not set, and {file} cannot be read ({error.strerror}); "
            "see `ray get-auth-token`"
        ) from error
