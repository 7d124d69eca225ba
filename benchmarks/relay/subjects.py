"""Defines the servers of `benchmarks.relay`: fake engine, directory, our relay and gateway, and proxies."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.processes import HOST, Subject
from benchmarks.relay.report import GATEWAY, OURS, SEALED, SLOW
from workers.processes import free_port

SECRET = "benchmark"  # of the directory and its gateways
OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
)
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


def contenders(engine: Subject, directory: Subject, work: Path, peers: Path | None) -> list[Subject]:
    """Return the subjects that this machine can run: all servers between client and engine."""
    certificate, key = make_certificate(work)
    proxies = [haproxy(engine.port, work), haproxy(engine.port, work, certificate)]
    return [
        python(OURS, "bare_gateway", engine.url),
        our_gateway(directory.port, work),
        python(SEALED, "bare_gateway", engine.url, str(certificate), str(key), tls=True),
        *(proxy for proxy in proxies if proxy is not None),
        python(SLOW, "httpx_proxy", engine.url),
        *(peer_routers(peers, engine.url) if peers is not None else ()),
    ]


def python(name: str, module: str, *arguments: str, tls: bool = False) -> Subject:
    """Return a subject that runs a Python module of this package with a port and `arguments`."""
    port = free_port(HOST)
    command = [sys.executable, "-m", f"benchmarks.relay.{module}", str(port), *arguments]
    return Subject(name, command, port, tls=tls)


def engine() -> Subject:
    return python("direct", "engine")


def directory(engine_port: int, work: Path) -> Subject:
    return python("directory", "directory", str(engine_port), str(work), SECRET)


def our_gateway(directory_port: int, work: Path) -> Subject:
    port, settings = free_port(HOST), work / "gateway.json"
    config = {
        "directory": f"127.0.0.1:{directory_port}",
        "directory_secret": SECRET,
        "models": [{"name": "m"}],
        "port": port,
        "policy": "collocated",
    }
    settings.write_text(json.dumps(config))
    command = [sys.executable, "-m", "router.gateway.main", "--config", str(settings)]
    return Subject(GATEWAY, command, port, ready_path="/ready")


def make_certificate(work: Path) -> tuple[Path, Path]:
    """Return the path of a certificate and its key in one file, for HAProxy, and of the key alone (P-256)."""
    certificate, key = work / "cert.pem", work / "key.pem"
    command = [*shlex.split(OPENSSL), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate, key


def haproxy(engine_port: int, work: Path, certificate: Path | None = None) -> Subject | None:
    """Return HAProxy, with TLS if there is a certificate; None if it is not installed."""
    binary = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        return None
    port, name = free_port(HOST), "haproxy tls" if certificate else "haproxy"
    sealed = f" ssl crt {certificate} alpn http/1.1" if certificate else ""
    settings = work / f"{name}.cfg"
    settings.write_text(HAPROXY.format(port=port, engine=engine_port, sealed=sealed))
    return Subject(name, [binary, "-db", "-f", str(settings)], port, tls=certificate is not None)


def peer_routers(folder: Path, engine_url: str) -> list[Subject]:
    """Return the routers of requirements/peers.txt that are installed under a folder."""
    sglang, vllm = folder / "sglang-router/bin/python", folder / "vllm-router/bin/vllm-router"
    programs = {
        "sglang-router": (sglang, ["-m", "sglang_router.launch_router", "--policy", "manual"]),
        "vllm-router": (vllm, ["--policy", "consistent_hash"]),
    }
    found = []
    for name, (program, options) in programs.items():
        if program.exists():
            port = free_port(HOST)
            command = [str(program), *options, "--worker-urls", engine_url, "--host", HOST]
            command += ["--port", str(port), "--prometheus-port", str(free_port(HOST))]
            command += ["--prometheus-host", HOST] if name == "sglang-router" else []
            found.append(Subject(name, command, port))
    return found
