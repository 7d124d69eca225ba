"""Defines the configuration of the batch process, which is read from a JSON file without unknown keys."""

from dataclasses import dataclass, field

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from router.auth.keys import StructuredOutputs
from router.gateway.config import ServedModel
from router.http import ServerLimits, UpstreamLimits
from router.requests.cost_limits import MAX_BYTES_PER_TOKEN
from router.requests.fields import UnknownFields
from router.settings import ConfigFile

HOUR_S = 3600
MIN_WINDOW_S = HOUR_S
MAX_WINDOW_S = 7 * 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class BatchLimits:
    file_bytes: int = 2 << 30
    line_bytes: int = 16 << 20
    requests_per_batch: int = 1_000_000
    prompt_bytes_per_token: int = MAX_BYTES_PER_TOKEN
    structured_outputs: StructuredOutputs = StructuredOutputs.ALLOW  # whether lines may have grammars
    unknown_fields: UnknownFields = UnknownFields.DROP
    reported_errors: int = 100  # bad lines named in one failed batch; scanning stops there


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Settings of the dispatcher: how much offline work an engine gets, and how attempts are repeated."""

    max_in_flight: int = 256  # per engine
    keep_free_fraction: float = 0.10  # share of an engine's KV that offline work never gets
    harvest_prefill: bool = False  # prefillers take offline work too: idle ones, or all that co-serve
    coserving: bool = False  # engines abort offline work for a turn
    ageing_s: float | None = None  # an engine without offline work for so long gets a request in any case
    max_tries: int = 5
    request_timeout_s: float = 3600.0
    # Timing of the dispatcher, which only tests change.
    blind_window: int = 8  # in flight per engine while it reports no state
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    cancel_grace_s: float = 30.0
    tick_s: float = 0.25
    lost_after_s: float = 10.0  # how long an engine may be missing from the fleet view


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class BatchConfig:
    store_url: str  # sqlite:///path or postgresql+psycopg://…
    files_url: str  # a folder or any fsspec URL
    models: tuple[ServedModel, ...]
    directory: str  # host:port
    secret: str  # secret that the directory requires
    key: str  # key that gateways send to this process
    engine_key: str = ""  # key that engines require; empty: none
    shared_prefixes: tuple[str, ...] = ()  # as in the gateways' configuration
    host: str = "127.0.0.1"
    port: int = 0
    limits: BatchLimits = field(default_factory=BatchLimits)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    server: ServerLimits = field(default_factory=ServerLimits)  # towards the gateways
    upstream: UpstreamLimits = field(default_factory=UpstreamLimits)  # towards the engines
    flex_timeout_s: float = 900.0
    file_ttl_s: int | None = None  # input and output files are deleted after this long; None keeps them

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("key: is empty, so that anybody could send requests in any owner's name")


_FILE = ConfigFile(BatchConfig)
load, dump = _FILE.load, _FILE.dump
