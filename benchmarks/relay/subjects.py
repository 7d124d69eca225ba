"""What stands between client and engine in a run: how each is started, watched and ended."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.relay.client import API_KEY
from workers.processes import free_port

PACKAGE = "benchmarks.relay"
HOST = "127.0.0.1"
OPENSSL = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
OPENSSL += " -nodes -days 2 -subj /CN=localhost"
HAPROXY = """
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  http-reuse always
  option http-no-delay
frontend clients
  bind 127.0.0.1:{port}{sealed}
  default_backend engines
backend engines
  server engine 127.0.0.1:{engine}
"""
LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
"""

SECRET = "benchmark"  # of the directory and its gateways


@dataclass
class Subject:
    """A process tree under test.

    ``share``: the part of each load it is given, because it collapses under the whole.
    """

    name: str
    command: list[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    share: float = 1.0
    start_limit_s: float = 30.0
    ready_path: str = "/health"
    tls: bool = False
    restless: bool = False
    """It takes time on its processor when nobody asks: nobody else is measured beside it."""
    process: subprocess.Popen[bytes] | None = None

    def start(self, log: Path, processors: set[int]) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        os.sched_setaffinity(self.process.pid, processors)

    def wait_until_ready(self) -> bool:
        url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}{self.ready_path}"
        trust = ssl._create_unverified_context() if self.tls else None
        limit = time.monotonic() + self.start_limit_s
        while time.monotonic() < limit and self.process is not None and self.process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(url, timeout=1, context=trust) as answer,
            ):
                if answer.status == 200:
                    return True
            time.sleep(0.1)
        return False

    def _tree(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> float:
        """Time on a processor of every thread of the tree, in the scheduler's own nanoseconds."""
        total = 0
        for process in self._tree():
            for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    total += int(task.read_text().split()[0])
        return total / 1e9

    def memory_mb(self) -> float:
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 1e6

    def stop(self) -> None:
        if self.process is None:
            return
        elsewhere = self._tree()  # Ray's processes have groups of their own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for process in elsewhere:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process = None  # its number may be another's by now


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{PACKAGE}.{module}", *arguments]


def engine() -> Subject:
    port = free_port(HOST)
    return Subject("direct", python("engine", str(port)), port)


def ours(url: str) -> Subject:
    """The relay alone."""
    port = free_port(HOST)
    return Subject("conserve", python("bare_gateway", str(port), url), port)


def certificate(work: Path) -> tuple[Path, Path]:
    """A certificate with its key, P-256, and the key alone."""
    cert, key = work / "cert.pem", work / "key.pem"
    command = [*shlex.split(OPENSSL), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    cert.write_bytes(cert.read_bytes() + key.read_bytes())  # as HAProxy wants it
    return cert, key


def ours_sealed(url: str, cert: Path, key: Path) -> Subject:
    port = free_port(HOST)
    command = python("bare_gateway", str(port), url, str(cert), str(key))
    return Subject("conserve tls", command, port, tls=True)


def directory(engine_port: int, work: Path) -> Subject:
    port = free_port(HOST)
    return Subject("directory", python("directory", str(port), str(engine_port), str(work), SECRET), port)


def our_gateway(directory_port: int, work: Path) -> Subject:
    """The whole gateway: identity, binding, relay, metrics."""
    port = free_port(HOST)
    settings = work / "gateway.json"
    config = {
        "directory": f"127.0.0.1:{directory_port}",
        "directory_secret": SECRET,
        "models": [{"name": "m"}],
        "port": port,
        "policy": "collocated",
    }
    settings.write_text(json.dumps(config))
    command = [sys.executable, "-m", "router.gateway", "--config", str(settings)]
    return Subject("conserve gateway", command, port, ready_path="/ready")


def httpx_proxy(url: str) -> Subject:
    port = free_port(HOST)
    return Subject("fastapi+httpx", python("httpx_proxy", str(port), url), port, share=1 / 8)


def haproxy(engine_port: int, work: Path, cert: Path | None = None) -> Subject | None:
    """With a certificate it speaks TLS."""
    binary = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        return None
    port = free_port(HOST)
    name, sealed = ("haproxy tls", f" ssl crt {cert} alpn http/1.1") if cert else ("haproxy", "")
    settings = work / f"{name}.cfg"
    settings.write_text(HAPROXY.format(port=port, engine=engine_port, sealed=sealed))
    return Subject(name, [binary, "-db", "-f", str(settings)], port, tls=cert is not None)


def peers(folder: Path, engine_port: int, work: Path, *, slow_ones: bool) -> list[Subject]:
    """The routers of requirements/peers.txt that are installed under ``folder``, one environment each."""
    url = f"http://127.0.0.1:{engine_port}"
    found: list[Subject] = []
    sglang = folder / "sglang-router/bin/python"
    if sglang.exists():
        port = free_port(HOST)
        command = [str(sglang), "-m", "sglang_router.launch_router", "--worker-urls", url]
        command += ["--policy", "manual", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port(HOST))]
        found.append(Subject("sglang-router", command, port))
    vllm = folder / "vllm-router/bin/vllm-router"
    if vllm.exists():
        port = free_port(HOST)
        command = [str(vllm), "--worker-urls", url, "--policy", "consistent_hash"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port(HOST))]
        found.append(Subject("vllm-router", command, port))
    litellm = folder / "litellm/bin/litellm"
    if slow_ones and litellm.exists():
        port = free_port(HOST)
        settings = work / "litellm.yaml"
        settings.write_text(LITELLM.format(engine=engine_port))
        command = [str(litellm), "--config", str(settings), "--host", "127.0.0.1", "--port", str(port)]
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": API_KEY}
        environment["PYTHONPATH"] = ""
        ready = "/health/liveliness"  # its /health asks the model
        found.append(Subject("litellm", command, port, environment, 1 / 16, 60, ready))
    serve = folder / "ray/bin/python"
    if slow_ones and serve.exists():
        port = free_port(HOST)
        script = Path(__file__).with_name("ray_serve.py")
        command = [str(serve), str(script), str(port), url, str(work / "ray")]
        environment = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""}
        found.append(Subject("ray-serve", command, port, environment, 1 / 16, 90, restless=True))
    return found
