"""Where a fleet keeps its state on this machine (docs/architecture.md, State on disk)."""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULT_HOME = "~/.conserve"
LONGEST_SOCKET_PATH = 107  # what the kernel takes for a Unix socket


PROFILES = "profiles.json"  # measured latency models, of all fleets
POWER = "power.json"  # limits GPUs had before we changed them; of the machine, because limits are


def conserve_home() -> Path:
    return Path(os.environ.get("CONSERVE_HOME") or DEFAULT_HOME).expanduser().resolve()


class HomeError(Exception):
    """The fleet's directory cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What is up: written when the supervisor starts, removed when everything is down."""

    pid: int  # the supervisor's
    started: float
    ray_address: str
    directory: str = ""  # host:port of its gRPC service
    endpoint: str = ""  # of the gateway, once it answers

    def same_run(self, other: "RunRecord | None") -> bool:
        """An upgrade changes addresses; another start is another run."""
        return other is not None and (self.pid, self.started) == (other.pid, other.started)


@dataclass(frozen=True, slots=True)
class FleetHome:
    root: Path

    @classmethod
    def of(cls, fleet: str, base: str | None = None) -> "FleetHome":
        return cls((Path(base).expanduser().resolve() if base else conserve_home()) / "fleets" / fleet)

    @property
    def mark(self) -> str:
        """The value of CONSERVE_FLEET in every process of this fleet."""
        return str(self.root)

    @property
    def fleet_file(self) -> Path:
        return self.root / "fleet.yaml"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def ray(self) -> Path:
        return self.root / "ray"

    @property
    def journal(self) -> Path:
        return self.root / "directory" / "journal"

    @property
    def gateways(self) -> Path:
        return self.root / "gateway"

    @property
    def batch(self) -> Path:
        return self.root / "batch"

    @property
    def engines(self) -> Path:
        return self.root / "engines"

    @property
    def run_file(self) -> Path:
        return self.root / "run.json"

    def engine(self, name: str) -> Path:
        return self.engines / name

    def create(self) -> None:
        for directory in (self.ray, self.journal.parent, self.gateways, self.engines, self.batch / "files"):
            directory.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        longest = len(str(self.engine("x" * 40) / "engine.sock"))
        if longest > LONGEST_SOCKET_PATH:
            raise HomeError(f"{self.root} is too long a path for sockets; set CONSERVE_HOME to a shorter one")

    def secret(self) -> str:
        """The fleet's shared secret, made once."""
        return _kept_secret(self.root / "secret")

    def ray_token(self) -> Path:
        _kept_secret(self.ray / "token")
        return self.ray / "token"

    def read_run(self) -> RunRecord | None:
        try:
            return RunRecord(**json.loads(self.run_file.read_text()))
        except FileNotFoundError:
            return None

    def write_run(self, record: RunRecord) -> None:
        draft = self.run_file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(record)) + "\n")
        os.replace(draft, self.run_file)


def _kept_secret(file: Path) -> str:
    if not file.exists():
        draft = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(draft, "w") as opened:
            opened.write(secrets.token_urlsafe(32))
    return file.read_text().strip()
