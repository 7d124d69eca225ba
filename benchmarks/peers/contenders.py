"""What is compared: our fleets, and peers' routers over plain vLLM. Each is a context that yields a URL.

Engines are alike in model, options and threads; ours have our connector, scheduler and server besides, and on
CPUs one process less (`workers/serve.py`). Engines of the two routers are the same three, kept for the whole
run: idle ones take no time. Everything else is started for its turn and ended after it.
"""

import importlib.util
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

from benchmarks.live_policies import up
from benchmarks.relay.subjects import Subject
from deploy.fleet import FleetSpec
from deploy.fleet.components import engine_spec, engines
from deploy.home import FleetHome
from placement.engines import Role
from workers.launch import SERVER, EngineKeys, Start, engine_command
from workers.processes import free_port

HOST = "127.0.0.1"
ROUTER_LIMIT_S = 60.0
VLLMS_SERVER = "vllm.entrypoints.openai.api_server"
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


class DoesNotRun(Exception):
    """Why a contender is left out."""


@dataclass(frozen=True)
class PeerSetup:
    name: str
    start: Callable[[], AbstractContextManager[str]]  # raises DoesNotRun
    peer: bool = True


@dataclass(frozen=True)
class Bench:
    """What all contenders share."""

    fleet: FleetSpec
    work: Path
    peers: Path | None
    start_limit_s: float

    @property
    def replicas(self) -> int:
        return sum(tier.replicas for tier in self.fleet.tiers)

    def path(self, *parts: str) -> Path:
        """Of an installed peer."""
        found = self.peers.joinpath(*parts) if self.peers else None
        if found is None or not found.exists():
            raise DoesNotRun(f"not installed: no {'/'.join(parts)} under --peers")
        return found


def contenders(bench: Bench, plain: "PlainEngines") -> list[PeerSetup]:
    return [
        PeerSetup("ours", lambda: ours(bench, "elastic"), peer=False),
        PeerSetup("ours, first_turns: prefiller", lambda: ours(bench, "prefiller"), peer=False),
        PeerSetup("sglang-router", lambda: sglang_router(bench, plain)),
        PeerSetup("vllm-router", lambda: vllm_router(bench, plain)),
        PeerSetup("Ray Serve LLM", lambda: ray_serve_llm(bench)),
        PeerSetup("vllm-router, prefill/decode", lambda: vllm_router_disaggregated(bench)),
        PeerSetup("sglang-router, prefill/decode", sglang_router_disaggregated),
    ]


@contextmanager
def ours(bench: Bench, first_turns: str) -> Iterator[str]:
    placement = bench.fleet.placement.model_copy(update={"first_turns": first_turns})
    try:
        with up(bench.fleet.model_copy(update={"placement": placement}), bench.start_limit_s) as url:
            yield url
    except subprocess.TimeoutExpired as late:
        raise DoesNotRun(f"`{' '.join(late.cmd[2:5])}` took more than {late.timeout:.0f} s") from late


@contextmanager
def sglang_router(bench: Bench, plain: "PlainEngines") -> Iterator[str]:
    python, port = bench.path("sglang-router", "bin", "python"), free_port(HOST)
    command = [str(python), "-m", "sglang_router.launch_router", "--worker-urls", *plain.urls()]
    command += ["--policy", "cache_aware", "--host", HOST, "--port", str(port)]
    command += ["--prometheus-host", HOST, "--prometheus-port", str(free_port(HOST))]
    with _serving(bench, Subject("sglang-router", command, port, start_limit_s=ROUTER_LIMIT_S)) as url:
        yield url


@contextmanager
def vllm_router(bench: Bench, plain: "PlainEngines") -> Iterator[str]:
    binary, port = bench.path("vllm-router", "bin", "vllm-router"), free_port(HOST)
    command = [str(binary), "--worker-urls", *plain.urls(), "--policy", "cache_aware"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port(HOST))]
    with _serving(bench, Subject("vllm-router", command, port, start_limit_s=ROUTER_LIMIT_S)) as url:
        yield url


@contextmanager
def vllm_router_disaggregated(bench: Bench) -> Iterator[str]:
    """One prefiller and two decoders, KV by vLLM's NixlConnector."""
    binary, port = bench.path("vllm-router", "bin", "vllm-router"), free_port(HOST)
    nixl = None if importlib.util.find_spec("nixl") else bench.path("nixl")
    with ExitStack() as stack:
        moving = stack.enter_context(PlainEngines(bench, {"PYTHONPATH": str(nixl)} if nixl else {}))
        first, *others = moving.urls()
        command = [str(binary), "--vllm-pd-disaggregation", "--prefill", first, "none"]
        for url in others:
            command += ["--decode", url]
        command += ["--policy", "cache_aware", "--host", HOST, "--port", str(port)]
        command += ["--prometheus-port", str(free_port(HOST))]
        subject = Subject("vllm-router-pd", command, port, start_limit_s=ROUTER_LIMIT_S)
        yield stack.enter_context(_serving(bench, subject))


@contextmanager
def sglang_router_disaggregated() -> Iterator[str]:
    raise DoesNotRun("its prefill/decode mode speaks the bootstrap of SGLang's engines, which vLLM has not")
    yield ""


@contextmanager
def ray_serve_llm(bench: Bench) -> Iterator[str]:
    """Engines inside Ray Serve's replicas, requests routed by prefix."""
    python, port = bench.path("ray-serve-llm", "bin", "python"), free_port(HOST)
    model, engine = bench.fleet.model, bench.fleet.engine
    options = {name.replace("-", "_"): value for name, value in engine.args.items()}
    env = {**engine.env, "OMP_NUM_THREADS": str(engine.threads or 1), "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    settings = {
        "port": port,
        "replicas": bench.replicas,
        "model_id": model.name,
        "model": model.path,
        "engine": options | {"dtype": model.dtype, "max_model_len": model.max_context},
        "env": env,
        "folder": str(bench.work / "ray"),
    }
    file = bench.work / "ray-serve-llm.json"
    file.write_text(json.dumps(settings))
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": token_hex(), "PYTHONPATH": "", **env}
    script = Path(__file__).with_name("ray_serve_llm.py")
    subject = Subject("ray-serve-llm", [str(python), str(script), str(file)], port, environment)
    subject.start_limit_s, subject.ready_path = bench.start_limit_s, "/v1/models"
    with _serving(bench, subject) as url:
        yield url


@contextmanager
def _serving(bench: Bench, subject: Subject) -> Iterator[str]:
    log = bench.work / f"{subject.name}.log"
    subject.start(log, os.sched_getaffinity(0))
    try:
        if not subject.wait_until_ready():
            raise DoesNotRun(
                f"did not serve within {subject.start_limit_s:.0f} s; its log ends: {log.read_text()[-400:]}"
            )
        yield f"http://{HOST}:{subject.port}"
    finally:
        subject.stop()


class PlainEngines:
    """vLLM with our options and its own server, without anything of ours in it, as many as the fleet has."""

    def __init__(self, bench: Bench, moves_kv: dict[str, str] | None = None) -> None:
        """`moves_kv`: by NIXL, with this in the environment."""
        self._bench = bench
        self._moves_kv = moves_kv
        self._processes: list[subprocess.Popen[bytes]] = []
        self._urls: list[str] = []

    def __enter__(self) -> "PlainEngines":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children are in its group
            process.wait(30)
        self._processes.clear()

    def urls(self) -> list[str]:
        """Started when first asked for."""
        if not self._processes:
            for number in range(self._bench.replicas):
                self._start(number)
            self._wait()
        return self._urls

    def _start(self, number: int) -> None:
        bench, port = self._bench, free_port(HOST)
        decoder = next(engine for engine in engines(bench.fleet) if engine.tier.role is not Role.PREFILL)
        spec = engine_spec(bench.fleet, decoder, FleetHome(bench.work / "home"), HOST)
        spec = replace(spec, connector=None, scheduler_class=None, additional=None)
        command = engine_command(spec, Start(1, port, 0), EngineKeys(), os.environ)
        argv, env = [*command.argv], dict(command.env)
        argv[argv.index(SERVER)] = VLLMS_SERVER
        for at in reversed([at for at, option in enumerate(argv) if option == "--middleware"]):
            del argv[at : at + 2]
        if self._moves_kv is not None:
            env |= self._moves_kv
            argv += ["--kv-transfer-config", json.dumps(NIXL)]
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(HOST))
        with self._log(number).open("wb") as log:
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)
        self._urls.append(f"http://{HOST}:{port}")

    def _log(self, number: int) -> Path:
        return self._bench.work / f"plain-{'' if self._moves_kv is None else 'moving-'}{number}.log"

    def _wait(self) -> None:
        limit = time.monotonic() + self._bench.start_limit_s
        for number, (process, url) in enumerate(zip(self._processes, self._urls, strict=True)):
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > limit:
                    end = self._log(number).read_text(errors="replace")[-400:]
                    self.__exit__()
                    self._urls.clear()
                    raise DoesNotRun(f"plain vLLM does not start; its log ends: {end}")
                time.sleep(0.2)


def _healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
        return bool(answer.status == 200)
    return False
