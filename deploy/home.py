"""Keeps a fleet's state on this machine (`docs/architecture.md`, State on disk), and derives its keys.

There is one key for each purpose, derived from the token of the fleet's Ray cluster. Every node of the
cluster has that token, so actors need no secret among their arguments, which Ray stores and distributes. An
actor derives the keys on its node, and gives each process that it starts only the keys of its work.
"""

import contextlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from deploy.errors import DeployError, LifecycleError
from workers.processes import write_atomically

DEFAULT_HOME = "~/.conserve"
LONGEST_SOCKET_PATH = 107  # of a Unix socket, by the kernel
CONTROL_FILE = "control"  # in an engine's folder: host:port of its keeper
POWER = "power.json"  # former power limits of the machine's GPUs, in one file for all fleets


def conserve_home() -> Path:
    return Path(os.environ.get("CONSERVE_HOME") or DEFAULT_HOME).expanduser().resolve()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a fleet's run: written when its supervisor starts, removed when all its processes ended."""

    pid: int  # pid of the supervisor; 0 on a Ray cluster that is not ours
    started: float
    ray_address: str
    directory: str = ""  # host:port of its gRPC service
    endpoint: str = ""  # the gateway's URL once it answers
    ending: bool = False  # whether a command is ending the fleet

    def same_run(self, other: "RunRecord | None") -> bool:
        """Return whether `other` is of the same run. An upgrade changes a record's addresses, not the run."""
        return other is not None and (self.pid, self.started) == (other.pid, other.started)


class Below:
    """Attribute of FleetHome that is a path below the fleet's directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, home: "FleetHome", _kind: type) -> Path:
        return home.root.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class FleetHome:
    """Directory of a fleet on this machine."""

    root: Path

    fleet_file = Below("fleet.yaml")
    run_file = Below("run.json")
    model = Below("model")
    ray = Below("ray")
    directory = Below("directory")
    journal = Below("directory", "journal")
    gateways = Below("gateway")
    batch = Below("batch")
    profiles = Below("profiles.json")  # measured latency models of its engines
    engines = Below("engines")

    @classmethod
    def of(cls, fleet: str, base: str | None = None) -> "FleetHome":
        return cls((Path(base).expanduser().resolve() if base else conserve_home()) / "fleets" / fleet)

    @classmethod
    def of_runs(cls) -> list["FleetHome"]:
        """Return the homes of fleets with a run record: up, starting, or killed and not yet brought down."""
        return [cls(file.parent) for file in sorted(conserve_home().glob("fleets/*/run.json"))]

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def mark(self) -> str:
        """Return the value that CONSERVE_FLEET has in every process of this fleet."""
        return str(self.root)

    def engine(self, name: str) -> Path:
        return self.engines / name

    def create(self) -> None:
        for directory in (self.ray, self.directory, self.gateways, self.engines, self.batch / "files"):
            directory.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        longest = len(str(self.engine("x" * 40) / "engine.sock"))
        if longest > LONGEST_SOCKET_PATH:
            raise DeployError(f"{self.root} is too long for sockets; set CONSERVE_HOME to a shorter path")

    def ray_token(self) -> Path:
        """Return the file with the token of our own cluster; the first call creates it."""
        file = self.ray / "token"
        with contextlib.suppress(FileExistsError), os.fdopen(_new_file(file), "w") as opened:
            opened.write(secrets.token_urlsafe(32))
        return file

    def read_run(self) -> RunRecord | None:
        try:
            return RunRecord(**json.loads(self.run_file.read_text()))
        except FileNotFoundError:
            return None

    def write_run(self, record: RunRecord) -> None:
        write_atomically(self.run_file, json.dumps(asdict(record)) + "\n")


def _new_file(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DEFAULT_TOKEN_PATH = "~/.ray/auth_token"  # Ray's
LEAST_CHARACTERS = 16
_NONCE_BYTES = 12


class TokenError(LifecycleError):
    """The Ray cluster has no token, or one that is too short."""


class Purpose(StrEnum):
    DIRECTORY = "directory"  # for requests of gateways, the batch process and commands to the directory
    KEEPERS = "keepers"  # for requests of the directory, the autoscaler and commands to keepers
    ENGINES = "engines"  # for requests of gateways, the batch process and keepers to engines
    TRANSFER = "transfer"  # for transfers between engines
    BATCH = "batch"  # for requests of gateways to the batch process
    ACTORS = "actors"  # encrypts the arguments of actors, which Ray stores


class FleetKeys:
    def __init__(self, token: str, fleet: str) -> None:
        if len(token) < LEAST_CHARACTERS:
            raise TokenError(f"the Ray cluster's token is shorter than {LEAST_CHARACTERS} characters")
        self._root = hmac.digest(token.encode(), f"conserve fleet {fleet}".encode(), "sha256")

    @classmethod
    def here(cls, fleet: str) -> Self:
        """Return the keys of `fleet`, derived from the cluster's token in this process's Ray settings."""
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
    """Return the cluster's token from the places where Ray looks for it, in Ray's order."""
    if given := environ.get(TOKEN, "").strip():
        return given
    file = Path(environ.get(TOKEN_PATH) or DEFAULT_TOKEN_PATH).expanduser()
    try:
        return file.read_text().strip()
    except OSError as error:
        raise TokenError(
            f"no token of a Ray cluster: {TOKEN} is not set, and {file} cannot be read ({error.strerror}); "
            "see `ray get-auth-token`"
        ) from error
