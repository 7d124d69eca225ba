"""Real vLLM engines for tests: starts them, sends prompts, reads counters, and ends all their processes."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil

from deploy.small_model import make_model
from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from kvtransfer.control.control_socket import ControlSocketClient
from placement.engines import EngineState
from tests.support import engine_device
from tests.support.warm_process import start_module
from workers.engine.coserving.config import (
    PROMPT_SCHEDULER,
    SAFEPOINT_PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)
from workers.keeper.launch import SERVER
from workers.processes import tree

SECRET = "a secret only for these tests"
START_S = 400.0
ASK_S = 240.0
DONE_AT_ONCE = ["--no-async-scheduling"]
_asking = ThreadPoolExecutor(32)


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive free ports."""
    for _ in range(50):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count < 65536:
            return first
    raise RuntimeError("no free port")


def model_directory() -> Path:
    directory = Path(tempfile.gettempdir()) / "conserve-test-model"
    make_model(directory)
    return directory


@dataclass
class GeneratedAnswer:
    text: str
    tokens: list[int]
    usage: dict[str, Any]
    seconds: float


@dataclass
class EngineProcess:
    """One engine on its own port, as in a fleet; `connector=None` is plain vLLM.

    The engine co-serves if its connector has safepoints.
    """

    connector: ConnectorConfig | None = None
    blocks: int = 600
    block_tokens: int = 32
    batched_tokens: int = 2048
    secret: str = SECRET
    arguments: Sequence[str] = ()
    http: int = field(default_factory=free_port)
    process: ForkServerProcess | None = None
    log: Path = field(default_factory=lambda: Path(tempfile.mkstemp(suffix=".log", prefix="engine-")[1]))

    @property
    def iteration_log(self) -> Path:
        return self.log.with_suffix(".iterations")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def context(self) -> int:
        return min(16000, (self.blocks - 2) * self.block_tokens)

    def start(self) -> "EngineProcess":
        command = ["--model", str(model_directory()), "--served-model-name", "m", "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.http), "--max-model-len", str(self.context())]
        command += ["--num-gpu-blocks-override", str(self.blocks), "--block-size", str(self.block_tokens)]
        command += ["--max-num-batched-tokens", str(self.batched_tokens), "--max-num-seqs", "16"]
        command += ["--enforce-eager", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
        command += self.arguments
        for name, value in engine_device.options().items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self.connector.to_kv_transfer_config())]
            settings = CoServingConfig(iteration_log=str(self.iteration_log)).to_additional_config()
            coserves = SAFEPOINT_PLUGIN in self.connector.plugins
            command += ["--scheduler-cls", SCHEDULER_CLASS if coserves else PROMPT_SCHEDULER]
            command += ["--worker-cls", WORKER_CLASS, *DONE_AT_ONCE] if coserves else []
            command += ["--additional-config", json.dumps(settings)]
            if "--scheduling-policy" not in command:
                command += ["--scheduling-policy", "priority"]
        environment = {
            **os.environ,
            **(self.connector.environment() if self.connector is not None else {}),
            SECRET_VARIABLE: self.secret,
            **engine_device.environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self.process = start_module(SERVER, command, environment, self.log)
        self._wait_ready()
        self.ask([5, 6, 7], max_tokens=2)  # an engine is warm before it takes transferred requests
        return self

    def _wait_ready(self) -> None:
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            assert self.process is not None
            if not self.process.is_alive():
                raise RuntimeError(f"engine ended at start:\n{self.errors()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"engine not ready in {START_S} s:\n{self.errors()}")

    def errors(self) -> str:
        lines = [line for line in self.log.read_text().splitlines() if "ERROR" in line or "Error" in line]
        return "\n".join(lines[-60:])

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            return tree(psutil.Process(self.process.pid))
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        processes = self.tree()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=20)
        if self.process is not None:
            self.process.join(20)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}},
        )
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error.code}: {error.read().decode()[:2000]}") from error

    def ask(
        self,
        prompt: list[int],
        max_tokens: int = 16,
        params: dict[str, Any] | None = None,
        session: str = "",
        **more: Any,
    ) -> GeneratedAnswer:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            **more,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        start = time.monotonic()
        answer = self.post("/v1/completions", body, **({"X_Session_ID": session} if session else {}))
        choice = answer["choices"][0]
        return GeneratedAnswer(
            choice["text"], list(choice["token_ids"]), answer["usage"], time.monotonic() - start
        )

    def ask_later(self, *arguments: Any, **more: Any) -> "Future[GeneratedAnswer]":
        return _asking.submit(self.ask, *arguments, **more)

    def metrics(self) -> dict[str, float]:
        """Return the value of each metric, summed over its labels.

        Metrics with a label `source` or `reason` are also there by value of the label: `name{source="…"}`.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            match = re.match(r"^([a-z_:A-Z0-9]+)(\{.*\})? ([0-9.e+-]+)$", line)
            if match:
                name, labels, value = match[1], match[2] or "", float(match[3])
                found[name] = found.get(name, 0) + value
                for key, text_value in re.findall(r'(\w+)="([^"]*)"', labels):
                    if key in ("source", "reason"):
                        label = f'{name}{{{key}="{text_value}"}}'
                        found[label] = found.get(label, 0) + value
        return found

    def computed_prompt_tokens(self) -> float:
        return self.metrics().get('vllm:prompt_tokens_by_source_total{source="local_compute"}', 0.0)


@contextlib.contextmanager
def running(*engines: EngineProcess) -> Iterator[tuple[EngineProcess, ...]]:
    """Run engines within this block. They start two at a time, which is fastest on two cores."""
    try:
        with ThreadPoolExecutor(2) as starting:
            started = tuple(starting.map(EngineProcess.start, engines))
        yield started
    finally:
        for engine in engines:
            if engine.process is not None:
                engine.kill()
            engine.log.unlink(missing_ok=True)
            engine.iteration_log.unlink(missing_ok=True)


def socket_path() -> str:
    return str(Path(tempfile.mkdtemp(prefix="engine-")) / "engine.sock")


T = TypeVar("T")


def over_control_socket(engine: EngineProcess, talk: Callable[[ControlSocketClient], Awaitable[T]]) -> T:
    """Run `talk` with a client of an engine's control socket, and return its result."""
    assert engine.connector is not None and engine.connector.control_socket

    client = ControlSocketClient(Path(engine.connector.control_socket))

    async def session() -> T:
        return await asyncio.wait_for(talk(client), 20)

    return asyncio.run(session())


def state_of(engine: EngineProcess) -> EngineState:
    async def newest(client: ControlSocketClient) -> EngineState:
        async with aclosing(client.states()) as states:
            return await anext(states)

    return over_control_socket(engine, newest)


def faults_of(engine: EngineProcess) -> list[str]:
    return list(over_control_socket(engine, lambda client: client.check()))


def eventually(true: Callable[[], bool], limit_s: float = 30) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.1)
    return False
