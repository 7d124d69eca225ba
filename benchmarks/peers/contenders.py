"""Contenders of `benchmarks.peers`: our fleets, and routers over plain vLLM, each a context with a URL.

All engines have the same model, options and threads. Ours add our connector, scheduler and server, and have
one process less on CPUs (`workers/serve.py`). The routers share engines that run during the whole benchmark,
since idle engines take no CPU time. Everything else starts for its turn and ends after it.
"""

import importlib.util
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks.harness.engines import Bench, DoesNotRun, PlainEngines
from benchmarks.harness.fleet import changed, up
from benchmarks.harness.processes import HOST, Subject
from workers.processes import free_port

ROUTER_LIMIT_S = 60.0


@dataclass(frozen=True)
class PeerSetup:
    """A contender and its start; `start` raises `DoesNotRun` if it cannot run here."""

    name: str
    start: Callable[[], AbstractContextManager[str]]
    peer: bool = True


def contenders(bench: Bench, plain: PlainEngines) -> list[PeerSetup]:
    return [
        PeerSetup("ours", lambda: ours(bench, "elastic"), peer=False),
        PeerSetup("ours, first_turns: prefiller", lambda: ours(bench, "prefiller"), peer=False),
        PeerSetup("sglang-router", lambda: sglang_router(bench, plain)),
        PeerSetup("vllm-router", lambda: vllm_router(bench, plain)),
        PeerSetup("vllm-router, prefill/decode", lambda: vllm_router_disaggregated(bench)),
    ]


@contextmanager
def ours(bench: Bench, first_turns: str) -> Iterator[str]:
    fleet = changed(bench.fleet, placement={"first_turns": first_turns})
    try:
        with up(fleet, bench.start_limit_s) as url:
            yield url
    except subprocess.TimeoutExpired as late:
        raise DoesNotRun(f"`{' '.join(late.cmd[2:5])}` took more than {late.timeout:.0f} s") from late


@contextmanager
def sglang_router(bench: Bench, plain: PlainEngines) -> Iterator[str]:
    python, port = bench.path("sglang-router", "bin", "python"), free_port(HOST)
    command = [str(python), "-m", "sglang_router.launch_router", "--worker-urls", *plain.urls()]
    command += ["--prometheus-host", HOST]
    yield from router(bench, "sglang-router", command, port)


@contextmanager
def vllm_router(bench: Bench, plain: PlainEngines) -> Iterator[str]:
    binary, port = bench.path("vllm-router", "bin", "vllm-router"), free_port(HOST)
    yield from router(bench, "vllm-router", [str(binary), "--worker-urls", *plain.urls()], port)


@contextmanager
def vllm_router_disaggregated(bench: Bench) -> Iterator[str]:
    """Run one prefiller and two decoders, which move KV by vLLM's NixlConnector."""
    binary, port = bench.path("vllm-router", "bin", "vllm-router"), free_port(HOST)
    nixl = None if importlib.util.find_spec("nixl") else bench.path("nixl")
    with PlainEngines(bench, {"PYTHONPATH": str(nixl)} if nixl else {}) as engines:
        first, *others = engines.urls()
        command = [str(binary), "--vllm-pd-disaggregation", "--prefill", first, "none"]
        for url in others:
            command += ["--decode", url]
        yield from router(bench, "vllm-router-pd", command, port)


def router(bench: Bench, name: str, command: Sequence[str], port: int) -> Iterator[str]:
    """Run a router that sends requests to the engine that has their prefix."""
    options = ["--policy", "cache_aware", "--host", HOST, "--port", str(port)]
    options += ["--prometheus-port", str(free_port(HOST))]
    subject = Subject(name, [*command, *options], port, start_limit_s=ROUTER_LIMIT_S)
    try:
        yield bench.ready(subject)
    finally:
        subject.stop()
