"""Configuration of a gateway: frozen dataclasses, read from a JSON file; unknown keys are refused."""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import starmap
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from placement.prefetch_rules import PrefetchRules
from placement.routing.placer_settings import PlacingPolicy, Redisaggregation
from router.auth.keys import DefaultLimits, Key
from router.http import ServerLimits, UpstreamLimits
from router.requests.cost_limits import MAX_ANSWERS, MAX_BYTES_PER_TOKEN
from router.requests.fields import UnknownFields
from router.settings import MIB, SETTINGS, ConfigFile, Duration, FilePath, Share

_STRICT = ConfigDict(extra="forbid")
_SERVER, _UPSTREAM = ServerLimits(), UpstreamLimits()


class Handover(StrEnum):
    """Order in which the two legs of a transferred turn start."""

    TOGETHER = "together"  # both start at the same time and share a transfer id (our own connector)
    IN_TURN = "in_turn"  # the decode leg starts with parameters from the prefill's answer (NIXL)


@checked(frozen=True, config=_STRICT)
class ServedModel:
    """Model that the fleet serves: its name, its aliases, and whether it makes embeddings."""

    name: str
    aliases: tuple[str, ...] = ()
    embeddings: bool = False


@checked(frozen=True, config=SETTINGS)
class SloSettings:
    """Latency targets of one SLO class, its `queue_weight`, and the owners that may use it."""

    ttfet_s: Duration | None = None
    """From the first turn's arrival to the first token of the last turn, which answers the user. The shortest
    TTFT that a turn may ask of its engine is `coserving.ttft`; in classes other than `default` it is this
    target, if that is shorter."""
    last_turn_tbt_s: Duration | None = None
    """Time between tokens of the last turn. In classes other than `default`, engines apply this target to
    every turn, and no turn may ask for less. For turns of `default`, engines apply `coserving.tbt`."""
    e2e_s: Duration | None = None
    """From the first turn's arrival to the end of the last turn."""
    queue_weight: Annotated[Duration, Field(alias="ahead")] = 0.0
    """Waiting turns of the class with the largest value go first. A class whose value is N seconds smaller is
    served at least once in N seconds."""
    owners: Annotated[tuple[str, ...], Field(alias="keys")] = ()
    """Owners, or keys of `gateway.api_keys`, whose turns get this class. No other caller can ask for it. If
    the list is empty, every caller can."""

    @property
    def targets(self) -> dict[str, float]:
        """Return the seconds of each target that is set, by the name of its objective."""
        targets = {"ttfet": self.ttfet_s, "last_turn_tbt": self.last_turn_tbt_s, "e2e": self.e2e_s}
        return {objective: target for objective, target in targets.items() if target is not None}


DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class SloClass:
    """SLO class of the fleet: its name and its settings."""

    name: str
    settings: SloSettings = field(default_factory=SloSettings)

    def open_to(self, owner: str) -> bool:
        """Return whether turns of `owner` may ask for this class."""
        return not self.settings.owners or owner in self.settings.owners


def _check_receiver(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        right = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a port
        right = False
    if not right or parts.query or parts.fragment:
        raise ValueError("http://host:port of an OTLP receiver, with a path if it needs one")
    return endpoint


@checked(frozen=True, config=SETTINGS)
class TracingConfig:
    """Destination of traces, and the share of turns that are traced."""

    endpoint: Annotated[str, AfterValidator(_check_receiver)]
    """URL of the OTLP receiver to which gateways and engines send spans, such as `http://127.0.0.1:4318` or
    `https://HOST/api/public/otel`. With protocol `http`, `/v1/traces` is appended.
    `OTEL_EXPORTER_OTLP_HEADERS` may hold the receiver's key."""
    sample: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the turns that are traced. A client that sends `traceparent` decides for its own turn."""
    protocol: Literal["http", "grpc"] = "http"
    """With `grpc` (`http://127.0.0.1:4317`) spans are sent without TLS, because vLLM does not offer it."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint)
        if self.protocol == "grpc" and (parts.scheme != "http" or parts.path.strip("/")):
            raise ValueError("endpoint of protocol grpc: expected http://host:port, without a path or TLS")

    @property
    def traces_endpoint(self) -> str:
        """Return the URL to which spans are sent."""
        base = self.endpoint.rstrip("/")
        return base if self.protocol == "grpc" or base.endswith("/v1/traces") else f"{base}/v1/traces"


@checked(frozen=True, config=_STRICT)
class BatchAddress:
    """Address of the batch process, the key that it requires, and the largest file that it accepts."""

    http: str  # host:port
    key: str = ""  # key that the batch process requires
    max_file_bytes: int = 2 << 30


@checked(frozen=True, config=SETTINGS)
class TlsConfig:
    """Certificate and key as PEM files on the gateways' machine. Gateways reload them when they change."""

    cert: FilePath
    """The certificate, followed by those of its issuers (`fullchain.pem`)."""
    key: FilePath


@checked(frozen=True, config=SETTINGS)
class AnswersConfig:
    """Settings of stored answers of the Responses API (`previous_response_id`, `GET /v1/responses/{id}`)."""

    path: str = ""
    """SQLite file; by default in the fleet's directory."""
    keep_s: Duration = 24 * 3600.0
    """How long an answer is kept after its last use."""
    gib: Annotated[float, Field(gt=0)] = 1.0
    """Most storage for all answers. Beyond it, owners with more than their share lose the answers that they
    used least recently."""

    @property
    def max_bytes(self) -> int:
        return int(self.gib * (1 << 30))


@checked(frozen=True, config=SETTINGS)
class GatewayLimits:
    """Limits of one gateway process on its clients and engines."""

    body_mib: Annotated[float, Field(gt=0)] = _SERVER.max_body_bytes / MIB
    """Largest request body."""
    headers: Annotated[int, Field(gt=0)] = _SERVER.max_headers
    """Most headers of a request."""
    header_kib: Annotated[int, Field(gt=0)] = _SERVER.max_head_bytes >> 10
    """Largest request line and headers together."""
    connections: Annotated[int, Field(gt=0)] = _SERVER.max_connections
    """Most connections of clients at a time."""
    owner_share: Share = 0.5
    """Share of the connections that one owner's running requests may take; more are answered with 429."""
    bodies_mib: Annotated[float, Field(gt=0)] = 2048.0
    """Memory for bodies of running requests. An owner may take as much as it leaves free for others, which is
    half of it if no other owner has requests; more is answered with 429."""
    prompt_bytes_per_token: Annotated[int, Field(gt=0, le=1024)] = MAX_BYTES_PER_TOKEN
    """Most bytes of a prompt for each token of the engines' largest context. A longer prompt is refused
    before it is tokenised. Prose has 4 to 5 bytes per token."""
    answers: Annotated[int, Field(gt=0, le=128)] = MAX_ANSWERS
    """Most answers that one request may ask for: `n` times its prompts."""
    request_timeout_s: Duration = _SERVER.body_timeout_s
    """Longest silence of a client that sends its request. The whole body may take a minute, and a second more
    for each 64 KiB."""
    first_token_timeout_s: Duration = _UPSTREAM.first_byte_timeout_s
    """Longest wait for an engine's first byte. Without streaming that byte follows the last token."""
    idle_timeout_s: Duration = _UPSTREAM.chunk_timeout_s
    """Longest silence of an engine within a stream, or of a client that does not read."""

    def __post_init__(self) -> None:
        if self.bodies_mib < 2 * self.body_mib:
            raise ValueError("bodies_mib must be at least twice body_mib")

    @property
    def server(self) -> ServerLimits:
        """Return the limits that the HTTP server applies to clients."""
        return ServerLimits(
            max_connections=self.connections,
            max_headers=self.headers,
            max_head_bytes=self.header_kib << 10,
            max_body_bytes=int(self.body_mib * MIB),
            head_timeout_s=self.request_timeout_s,
            body_timeout_s=self.request_timeout_s,
            write_stall_s=self.idle_timeout_s,
        )

    @property
    def upstream(self) -> UpstreamLimits:
        """Return the limits that apply to connections to engines."""
        return UpstreamLimits(
            first_byte_timeout_s=self.first_token_timeout_s, chunk_timeout_s=self.idle_timeout_s
        )


@checked(frozen=True, config=_STRICT)
class GatewayConfig:
    """Configuration of one gateway process."""

    directory: str  # host:port
    models: tuple[ServedModel, ...]
    fleet: str = "fleet"
    name: str = "gateway"  # name of this process; unique in the fleet
    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False  # several gateway processes on one port
    tls: TlsConfig | None = None  # without it the port speaks plain HTTP
    metrics_host: str = "127.0.0.1"  # address for the metrics page of this process alone
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    handover: Handover = Handover.TOGETHER
    redisaggregation: Redisaggregation = field(default_factory=Redisaggregation)
    prefetch: PrefetchRules = field(default_factory=PrefetchRules)
    place_wait_s: float = 30.0  # longest wait of a first turn for capacity
    longest_ttl_s: float = 24 * 3600.0  # longest idle time that a client may ask for
    unknown_fields: UnknownFields = UnknownFields.DROP  # what becomes of a request's unknown fields
    tokens_per_byte: float = 0.3  # assumed for text until engines have reported counts
    slos: dict[str, SloSettings] = field(default_factory=dict)
    ttft_s: float | None = None  # the engines' target for turns without one
    tbt_s: float | None = None  # the engines' target for classes without one
    keys: tuple[Key, ...] = ()  # keys of the fleet file; without these and a keys file, everybody may call
    keys_file: str | None = None  # more keys; read again when it changes
    hosts: tuple[str, ...] = ()  # host names by which clients may call this gateway; empty: any
    trusted_proxies: tuple[str, ...] = ()  # networks whose `X-Forwarded-For` is trusted
    audit: bool = False  # log every request
    key_limits: DefaultLimits = DefaultLimits()
    shared_prefixes: tuple[str, ...] = ()  # owners that share cached prefixes; "*": all
    directory_secret: str = ""
    engine_key: str = ""  # key that engines require; empty: none
    batch: BatchAddress | None = None  # None: no Files and Batch APIs, no service tier flex
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    tracing: TracingConfig | None = None
    drain_s: float = 30.0
    limits: GatewayLimits = field(default_factory=GatewayLimits)

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models: name at least one model")
        rule = self.redisaggregation
        if rule.above_tokens < 0 or self.place_wait_s < 0 or self.tokens_per_byte <= 0:
            raise ValueError("above_tokens and place_wait_s cannot be negative; tokens_per_byte is above 0")
        if not 0 <= rule.min_share <= 1:
            raise ValueError(f"redisaggregation.min_share is between 0 and 1, not {rule.min_share}")

    @property
    def classes(self) -> tuple[SloClass, ...]:
        """Return the SLO classes; `default` is always one of them."""
        return tuple(starmap(SloClass, ({DEFAULT_CLASS: SloSettings()} | self.slos).items()))

    @property
    def models_by_name(self) -> dict[str, ServedModel]:
        """Return each served model by its name and by each of its aliases."""
        return {name: model for model in self.models for name in (model.name, *model.aliases)}


_FILE = ConfigFile(GatewayConfig)
load, dump = _FILE.load, _FILE.dump
