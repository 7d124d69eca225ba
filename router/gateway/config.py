"""Configuration of a gateway: frozen dataclasses, read from a JSON file that has no unknown keys."""

from dataclasses import field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from placement.prefetch_rules import PrefetchRules
from placement.routing.placer_settings import PlacingPolicy, Redisaggregation
from router.auth.keys import DEFAULT_LIMITS, Key, Limits
from router.errors import GatewayConfigError
from router.http import ServerLimits, UpstreamLimits
from router.requests.prompt_limit import MAX_BYTES_PER_TOKEN

_STRICT = ConfigDict(extra="forbid")


class Handover(StrEnum):
    """Order of a transferred turn's two legs."""

    TOGETHER = "together"  # both start at once with one transfer id: our own connector
    IN_TURN = "in_turn"  # the decode leg gets the parameters of the prefill's answer: NIXL


@checked(frozen=True, config=_STRICT)
class ServedModel:
    """Model that the fleet serves."""

    name: str
    aliases: tuple[str, ...] = ()
    embeddings: bool = False


@checked(frozen=True, config=_STRICT)
class SloTargets:
    """Latency targets of answers to users; None where there is none."""

    ttfet_s: float | None = None
    last_turn_tbt_s: float | None = None
    e2e_s: float | None = None

    @property
    def by_objective(self) -> dict[str, float]:
        """Return the targets that are set, by objective."""
        targets = {"ttfet": self.ttfet_s, "last_turn_tbt": self.last_turn_tbt_s, "e2e": self.e2e_s}
        return {objective: target for objective, target in targets.items() if target is not None}


DEFAULT_CLASS = "default"


@checked(frozen=True, config=_STRICT)
class SloClass:
    """SLO class of turns."""

    name: str
    targets: SloTargets
    queue_weight: float = (
        0.0  # the class with the largest goes first where turns wait (`placement/priorities.py`)
    )
    owners: tuple[str, ...] = ()  # whose turns have this class; when set, nobody else may ask for it

    def open_to(self, owner: str) -> bool:
        return not self.owners or owner in self.owners


@checked(frozen=True, config=_STRICT)
class TracingConfig:
    """Destination and share of traced turns."""

    endpoint: str  # of an OTLP receiver over HTTP, without a path: http://collector:4318
    sample: float = 0.05  # share of turns, where the client did not decide

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.endpoint)
            right = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:  # not a port
            right = False
        if not right:
            raise ValueError(f"endpoint: {self.endpoint!r} is not http://host:port of an OTLP receiver")
        if not 0 <= self.sample <= 1:
            raise ValueError(f"sample: expected a share between 0 and 1, not {self.sample}")


@checked(frozen=True, config=_STRICT)
class BatchAddress:
    """Address of the batch process, and what it accepts."""

    http: str  # host:port
    key: str = ""  # that the batch process asks for
    max_file_bytes: int = 2 << 30


@checked(frozen=True, config=_STRICT)
class TlsConfig:
    """PEM files of the certificate with its chain, and of its key."""

    cert: str
    key: str


@checked(frozen=True, config=_STRICT)
class AnswersConfig:
    """Storage of answers of the Responses API: place, time and size."""

    path: str = ""  # of a SQLite file; empty: in the memory of this process
    keep_s: float = 24 * 3600.0  # since the last use
    max_bytes: int = 1 << 30


@checked(frozen=True, config=_STRICT)
class GatewayConfig:
    """Configuration of one gateway process."""

    directory: str  # host:port
    models: tuple[ServedModel, ...]
    fleet: str = "fleet"
    name: str = "gateway"  # of this process; unique in the fleet
    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False  # several gateway processes on one port
    tls: TlsConfig | None = None  # without it the port speaks plain HTTP
    metrics_host: str = "127.0.0.1"  # of the port with the metrics of this process alone
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    handover: Handover = Handover.TOGETHER
    redisaggregation: Redisaggregation = field(default_factory=Redisaggregation)
    prefetch: PrefetchRules = field(default_factory=PrefetchRules)
    place_wait_s: float = 30.0  # longest wait of a first turn for capacity
    longest_ttl_s: float = 24 * 3600.0  # longest idle time that a client may ask for
    prompt_bytes_per_token: int = MAX_BYTES_PER_TOKEN  # of the longest prompt that engines get
    tokens_per_byte: float = 0.3  # of text, until engines have reported their counts
    slo: SloTargets = field(default_factory=SloTargets)  # of the SLO class `default`
    classes: tuple[SloClass, ...] = ()
    ttft_s: float | None = None  # the engines' target for turns without one
    tbt_s: float | None = None  # the engines' target for classes without one
    keys: tuple[Key, ...] = ()  # of the fleet file; without any, and without a keys file, everybody may call
    keys_file: str | None = None  # more keys; read again when it changes
    hosts: tuple[str, ...] = ()  # names that clients may use; empty: any
    trusted_proxies: tuple[str, ...] = ()  # networks whose `X-Forwarded-For` is trusted
    audit: bool = False  # log every request
    key_limits: Limits = DEFAULT_LIMITS  # of keys without limits of their own
    shared_prefixes: tuple[str, ...] = ()  # owners that share cached prefixes; "*": all
    owner_share: float = 0.5  # share of the connections for one owner
    bodies_bytes: int = 2 << 30  # of all requests in memory
    directory_secret: str = ""
    engine_key: str = ""  # that engines ask for; empty: none
    batch: BatchAddress | None = None  # None: no Files and Batch APIs, no service tier flex
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    tracing: TracingConfig | None = None
    drain_s: float = 30.0
    limits: ServerLimits = field(default_factory=ServerLimits)
    upstream: UpstreamLimits = field(default_factory=UpstreamLimits)

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: name at least one model")
        rule = self.redisaggregation
        if rule.above_tokens < 0 or self.place_wait_s < 0 or self.tokens_per_byte <= 0:
            raise ValueError("above_tokens, place_wait_s and tokens_per_byte cannot be negative")
        if not 0 < self.owner_share <= 1:
            raise ValueError(f"owner_share is above 0 and at most 1, not {self.owner_share}")
        if self.bodies_bytes < 2 * self.limits.max_body_bytes:
            raise ValueError("bodies_mib is to hold two bodies of body_mib at least")
        if not 0 <= rule.min_share <= 1:
            raise ValueError(f"redisaggregation.min_share is between 0 and 1, not {rule.min_share}")

    @property
    def models_by_name(self) -> dict[str, ServedModel]:
        """Return the models by name and by alias."""
        return {name: model for model in self.models for name in (model.name, *model.aliases)}


def load(path: Path) -> GatewayConfig:
    """Read a configuration file. Raises GatewayConfigError with one line for each problem."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise GatewayConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(str(part) for part in problem['loc']) or 'file'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise GatewayConfigError("\n".join(lines)) from error


def dump(config: GatewayConfig) -> bytes:
    """Return the file contents from which `load` makes the same configuration."""
    return _ADAPTER.dump_json(config, indent=2)


_ADAPTER = TypeAdapter(GatewayConfig)
