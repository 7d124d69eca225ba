"""What a gateway is told at its start: one frozen tree, read from a JSON file, unknown keys refused."""

from dataclasses import field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from placement.policies import PlacingPolicy
from placement.redisaggregation import Redisaggregation
from router.batch.config import BatchConfig
from router.http import ServerLimits, UpstreamLimits

_STRICT = ConfigDict(extra="forbid")


class ConfigError(ValueError):
    """The configuration cannot be used; the text says where and what was expected."""


class Handover(StrEnum):
    TOGETHER = "together"  # both legs start at once with one transfer id: our own connector
    IN_TURN = "in_turn"  # the decode leg gets the parameters of the prefill's answer: NIXL


@checked(frozen=True, config=_STRICT)
class Model:
    name: str
    aliases: tuple[str, ...] = ()
    embeddings: bool = False


@checked(frozen=True, config=_STRICT)
class Slo:
    """Targets for answers to users; None where there is none."""

    ttfet_s: float | None = None
    last_turn_tbt_s: float | None = None
    e2e_s: float | None = None


@checked(frozen=True, config=_STRICT)
class Tracing:
    endpoint: str  # of an OTLP receiver over HTTP, without a path: http://collector:4318
    sample: float = 0.05  # share of the turns whose client did not decide it

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.endpoint)
            right = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            right = False
        if not right:
            raise ValueError(f"endpoint: {self.endpoint!r} is not http://host:port of an OTLP receiver")
        if not 0 <= self.sample <= 1:
            raise ValueError(f"sample: expected a share between 0 and 1, not {self.sample}")


@checked(frozen=True, config=_STRICT)
class GatewayConfig:
    directory: str  # host:port
    models: tuple[Model, ...]
    fleet: str = "fleet"
    name: str = "gateway"  # of this process; unique in the fleet
    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False  # several gateway processes on one port
    metrics_host: str = "127.0.0.1"  # where this very process has its metrics too, on a port of its own
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    handover: Handover = Handover.TOGETHER
    redisaggregate_tokens: int = 8192
    redisaggregate_share: float = 0.5
    place_wait_s: float = 30.0  # longest wait of a first turn for room
    tokens_per_byte: float = 0.3  # until the engines have said how it really is
    slo: Slo = field(default_factory=Slo)
    api_keys: tuple[str, ...] = ()  # none: any key may, and only scopes conversation ids
    admin_keys: tuple[str, ...] = ()  # see every conversation
    directory_secret: str = ""
    engine_api_key: str = ""
    batch: BatchConfig | None = None  # None: no Files and Batch APIs, no service tier flex
    tracing: Tracing | None = None
    drain_s: float = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)
    upstream: UpstreamLimits = field(default_factory=UpstreamLimits)

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: name at least one model")
        if self.redisaggregate_tokens < 0 or self.place_wait_s < 0 or self.tokens_per_byte <= 0:
            raise ValueError("redisaggregate_tokens, place_wait_s and tokens_per_byte cannot be negative")
        if not 0 <= self.redisaggregate_share <= 1:
            raise ValueError(f"redisaggregate_share is between 0 and 1, not {self.redisaggregate_share}")

    @property
    def redisaggregation(self) -> Redisaggregation:
        return Redisaggregation(self.redisaggregate_tokens, self.redisaggregate_share)

    def model(self, name: object) -> Model | None:
        return next((model for model in self.models if name == model.name or name in model.aliases), None)


def load(path: Path) -> GatewayConfig:
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as wrong:
        raise ConfigError(f"{path}: {wrong.strerror}") from wrong
    except ValidationError as wrong:
        lines = [
            f"{path}: {'.'.join(str(part) for part in problem['loc']) or 'file'}: {problem['msg']}"
            for problem in wrong.errors()
        ]
        raise ConfigError("\n".join(lines)) from wrong


def dump(config: GatewayConfig) -> bytes:
    """The file from which `load` makes the same configuration."""
    return _ADAPTER.dump_json(config, indent=2)


_ADAPTER = TypeAdapter(GatewayConfig)

__all__ = ["ConfigError", "GatewayConfig", "Handover", "Model", "Slo", "Tracing", "dump", "load"]
