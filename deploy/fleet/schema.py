"""The fleet file: what a fleet is made of. One class a block of the YAML file.

Strict: an unknown key is an error, and a number in quotes is not a number.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from deploy.fleet.duration import Duration
from placement.engines import Role

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=0, le=65_535)]
Gib = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=0)]
Watts = Annotated[int, Field(gt=0)]


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

SMALL_MODEL = "small"


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Model(Block):
    path: str = SMALL_MODEL
    """A Hugging Face id, a directory, or `small`: a tiny Qwen3 with random weights, made on the spot."""
    served_name: str | None = None
    """The model's name in requests; by default the last part of `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: Annotated[int, Field(gt=0)] | None = None
    """Longest conversation in tokens; by default what the model allows."""

    @property
    def name(self) -> str:
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class Engine(Block):
    """What all engines share."""

    device: Literal["cpu", "cuda"] = "cuda"
    args: Arguments = {}
    """vLLM's own options without the leading dashes, as in `max-num-seqs: 64`."""
    env: dict[str, str] = {}
    threads: Annotated[int, Field(gt=0)] | None = None
    """CPU threads an engine computes with (device cpu)."""
    start_together: Annotated[int, Field(gt=0)] | None = None
    """Engines that may start at the same time on a node; by default 1 on cpu, all on cuda."""
    start_limit: Duration = 900.0
    """An engine that is not healthy by then counts as failed."""
    stall_limit: Duration = 300.0
    """A starting engine that logs nothing for so long counts as failed."""
    health_interval: Duration = 1.0
    health_misses: Annotated[int, Field(gt=0)] = 10
    """Failed health checks in a row before an engine is restarted."""
    lease: Duration = 60.0
    """An engine whose keeper is gone for so long ends itself; until then it can be adopted with its KV."""


class Curve(Block):
    """Seconds to prefill n tokens: a + b*n + c*n*n, as `conserve profile` measures it."""

    a: Annotated[float, Field(ge=0)]
    b: Annotated[float, Field(ge=0)]
    c: Annotated[float, Field(ge=0)]


class Autoscale(Block):
    """Limits within which replicas follow the load; without this block their number is fixed."""

    min: Annotated[int, Field(gt=0, le=4096)]
    max: Annotated[int, Field(gt=0, le=4096)]


class Tier(Block):
    """Engines of one kind: the same role, hardware and arguments."""

    name: Name
    role: Role = Field(strict=False)
    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    autoscale: Autoscale | None = None
    """Then `replicas` is how many there are at first."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray resources one engine takes; a custom resource places the tier on its nodes."""
    power_cap_w: Watts | None = None
    """Power limit of each GPU of the tier."""
    prefill_curve: Curve | None = None
    """Of a tier that prefills; without it a coarse guess for the device."""
    args: Arguments = {}
    """Added to the engine's arguments, for this tier only."""
    env: dict[str, str] = {}


class GatewayLimits(Block):
    body_mib: Annotated[float, Field(gt=0)] = 32.0
    headers: Annotated[int, Field(gt=0)] = 100
    header_kib: Annotated[int, Field(gt=0)] = 64
    connections: Annotated[int, Field(gt=0)] = 10_000
    request_timeout: Duration = 30.0
    """Time a client has to send its request."""
    first_token_timeout: Duration = 600.0
    """Longest wait for an engine's first byte. Without streaming it comes after the last token."""
    idle_timeout: Duration = 120.0
    """Longest silence of an engine within a stream, or of a client that does not read."""


class Gateway(Block):
    host: str = "127.0.0.1"
    port: Port = 8000
    processes: Annotated[int, Field(gt=0, le=64)] = 1
    api_keys: list[str] = []
    """Accepted bearer keys; none means that any caller may."""
    admin_keys: list[str] = []
    """Keys that may drain engines and see every conversation."""
    limits: GatewayLimits = GatewayLimits()


class Conversation(Block):
    ttl: Duration = 1800.0
    """A conversation idle for so long has ended: its KV and its binding go."""
    park_after: Duration = 60.0
    """Idle time after which its KV is held on the host only."""
    redisaggregate_tokens: Tokens = 4096
    """A turn with more tokens that are not cached goes through a prefiller again, to the same decoder."""
    redisaggregate_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """And only if they are at least this share of its prompt: the prefiller computes the rest of it again."""
    headroom_tokens: Tokens = 1024
    """Reserved beside the prompt at binding, for what the conversation will grow by at first."""
    decoder_wait: Duration = 30.0
    """How long a first turn waits for a decoder with room before 429."""
    prefiller_wait: Duration = 10.0
    """How long a first turn may wait for a saturated prefiller before 429."""


class Slo(Block):
    """Targets of one class of conversations."""

    ttfet: Duration | None = None
    """From the first turn's arrival to the first token of the last turn, which is the answer to the user."""
    last_turn_tbt: Duration | None = None
    """Between the tokens of the last turn."""
    e2e: Duration | None = None
    """From the first turn's arrival to the end of the last."""


class Transfer(Block):
    backend: Literal["tcp", "nixl"] = "tcp"
    secret: str | None = None
    """Shared by the engines; by default made at random for each fleet."""
    lease: Duration = 60.0
    """How long a prefiller holds KV for its decoder."""
    timeout: Duration = 30.0
    """Longest silence within a transfer before the decoder computes the prompt itself."""


class Lmcache(Block):
    gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0
    """Memory of a node that its LMCache server may use."""
    timeout: Duration = 1.0
    """Longest wait for the server within a step of an engine, which then goes on without it."""


class Kv(Block):
    host_kv_gib: Gib = 4.0
    """Memory an engine may use on its host for parked conversations."""
    kv_tiers: list[Literal["host", "lmcache"]] = ["host"]
    """Where KV goes besides the accelerator: `host`, each engine's own memory, and behind it `lmcache`, a
    server on each node, from which a conversation whose decoder died is restored on another one."""
    lmcache: Lmcache = Lmcache()


class CoServing(Block):
    """Offline work in the cycles that decoders have left."""

    enabled: bool = False
    policy: Literal["conserve", "bros", "online_only", "non_preemptive", "sarathi"] = "conserve"
    ttft: Duration = 2.0
    """Promised to a request of a conversation, from its arrival at the engine to its first token."""
    tbt: Duration = 0.2
    """Promised between its tokens."""
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of a promise kept free for what the latency model gets wrong."""
    safepoints: bool = True
    """An arrival may abort the running batch."""
    safepoint_layers: Annotated[int, Field(gt=0)] = 1
    """Layers between two places where it can be aborted."""
    offline_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of an iteration's tokens, what offline work gets at least."""


class Batch(Block):
    """The Batch API."""

    enabled: bool = True
    max_requests: Annotated[int, Field(gt=0)] = 1_000_000
    """In one batch."""
    max_file_mib: Annotated[float, Field(gt=0)] = 2048.0
    in_flight_per_engine: Annotated[int, Field(gt=0)] = 256
    """Offline requests at most, of each gateway."""
    harvest_prefill: bool = False
    """Idle prefillers take offline work too."""
    keep_free: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of an engine's KV never planned for offline work."""
    file_ttl: Duration | None = None
    """Files are deleted after this long; without it they are kept."""
    database: str | None = None
    """SQLAlchemy URL; by default SQLite in the fleet's directory."""
    files: str | None = None
    """Where files lie: a directory or an fsspec URL; by default in the fleet's directory."""


class Tracing(Block):
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/]+/?$")]
    """An OTLP receiver over HTTP, as in `http://127.0.0.1:4318`; gateways and engines send spans to it."""
    sample: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the turns that are traced, of those whose client sends no `traceparent`, which decides it."""


class Observe(Block):
    tracing: Tracing | None = None
    """OpenTelemetry spans; without it none are made."""


Share = Annotated[float, Field(gt=0, le=1)]


class Capacity(Block):
    """When a tier is too small or too large: shares of prefillers' time, and of decoders' KV, in use."""

    window: Duration = 60.0
    """Time over which both are averaged."""
    high: Share = 0.85
    target: Share = 0.7
    """What a change of the number of engines aims at."""
    low: Share = 0.4
    cool_down: Duration = 120.0
    """After the autoscaler changed a tier, it adds nothing for so long."""
    calm: Duration = 600.0
    """A tier must have been below `low` for so long before the autoscaler takes an engine away."""
    drain: Duration = 120.0
    """How long turns may go on on an engine that is to end, before they are cut off."""


class Ray(Block):
    address: str | None = None
    """An existing cluster; without it a cluster of one node is started and ended with the fleet."""
    control_resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray resources that the directory and the gateways take, to place them on certain nodes."""
    object_store_mib: Annotated[int, Field(ge=80)] = 100
    dashboard: bool = False


class Fleet(Block):
    name: Name = "fleet"
    policy: Literal["conserve", "collocated", "full_disaggregation"] = "conserve"
    """`conserve` moves KV once; the other two are the baselines of the paper."""
    model: Model = Model()
    engine: Engine = Engine()
    tiers: Annotated[list[Tier], Field(min_length=1)]
    gateway: Gateway = Gateway()
    conversation: Conversation = Conversation()
    slos: dict[Name, Slo] = {"default": Slo()}
    transfer: Transfer = Transfer()
    kv: Kv = Kv()
    coserving: CoServing = CoServing()
    batch: Batch = Batch()
    capacity: Capacity = Capacity()
    observe: Observe = Observe()
    ray: Ray = Ray()
