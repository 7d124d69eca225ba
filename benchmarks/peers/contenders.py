"""Starts the contenders of `benchmarks.peers`: our fleets, and routers over plain vLLM.

All engines have the same model, options and threads. Ours add our connector, scheduler and server, and have
one process less on CPUs (`workers/serve.py`). The routers share engines that run during the whole benchmark,
because idle engines take no CPU time. Everything else starts before a contender's plays and ends after them.
"""

import importlib.util
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks.harness.engines import Bench, DoesNotRun, PlainEngines
from benchmarks.harness.fleet import brought_up, changed, counted
from benchmarks.harness.processes import HOST, Subject
from deploy.lifecycle.status import fleet_status, serving
from placement.routing.receipts import Why
from workers.processes import free_port

ROUTER_LIMIT_S = 60.0


@dataclass(frozen=True)
class FirstTurnCounts:
    """Counts of bound conversations.

    `bound` counts all, `on_prefillers` those whose first prompt a prefiller computed, and `least_kv` those
    bound to the decoder with the least KV in use.
    """

    bound: float
    on_prefillers: float
    least_kv: float

    def since(self, before: "FirstTurnCounts") -> "FirstTurnCounts":
        return FirstTurnCounts(
            self.bound - before.bound,
            self.on_prefillers - before.on_prefillers,
            self.least_kv - before.least_kv,
        )

    def share(self, count: float) -> float | None:
        return round(count / self.bound, 3) if self.bound else None


@dataclass(frozen=True)
class Serving:
    """A started contender: its address, its engines' addresses, and our directory's metrics page."""

    url: str
    engines: Mapping[str, str]
    directory: str = ""  # metrics page of our directory; empty for a peer

    def first_turns(self) -> FirstTurnCounts | None:
        """Return how our directory has placed first turns so far, or None for a peer."""
        if not self.directory:
            return None
        name, pages = "conserve_first_turns_placed_total", [self.directory]
        return FirstTurnCounts(
            counted(pages, name),
            counted(pages, name, prompt="prefiller"),
            counted(pages, name, decoder=Why.LEAST_KV_IN_USE.value),
        )


@dataclass(frozen=True)
class PeerSetup:
    """Name and start function of a contender. `start` raises `DoesNotRun` if it cannot run here."""

    name: str
    start: Callable[[], AbstractContextManager[Serving]]
    peer: bool = True
    over_plain: bool = False  # a router over plain engines, behind which the capacity is measured


def contenders(bench: Bench, plain: PlainEngines) -> list[PeerSetup]:
    return [
        PeerSetup("ours", lambda: ours(bench), peer=False),
        PeerSetup("ours, roles: elastic", lambda: ours(bench, roles="elastic"), peer=False),
        PeerSetup("ours, first_turns: prefiller", lambda: ours(bench, first_turns="prefiller"), peer=False),
        PeerSetup("sglang-router", lambda: sglang_router(bench, plain), over_plain=True),
        PeerSetup("vllm-router", lambda: vllm_router(bench, plain), over_plain=True),
        PeerSetup("vllm-router, prefill/decode", lambda: vllm_router_disaggregated(bench)),
    ]


@contextmanager
def ours(bench: Bench, **placement: str) -> Iterator[Serving]:
    fleet = changed(bench.fleet, placement=placement)
    try:
        with brought_up(fleet, bench.start_limit_s) as home:
            status = fleet_status(home)
            if not status.metrics:
                raise DoesNotRun("its directory did not report the address of its metrics within 3 s")
            engines = {one.engine: f"http://{one.http}" for one in status.engines}
            yield Serving(serving(home).endpoint, engines, f"http://{status.metrics}")
    except subprocess.TimeoutExpired as late:
        raise DoesNotRun(f"`{' '.join(late.cmd[2:5])}` took more than {late.timeout:.0f} s") from late


@contextmanager
def sglang_router(bench: Bench, plain: PlainEngines) -> Iterator[Serving]:
    python, port = bench.path("sglang-router", "bin", "python"), free_port(HOST)
    command = [str(python), "-m", "sglang_router.launch_router", "--worker-urls", *plain.urls()]
    command += ["--prometheus-host", HOST]
    yield from router(bench, "sglang-router", command, port, plain)


@contextmanager
def vllm_router(bench: Bench, plain: PlainEngines) -> Iterator[Serving]:
    binary, port = bench.path("vllm-router", "bin", "vllm-router"), free_port(HOST)
    yield from router(bench, "vllm-router", [str(binary), "--worker-urls", *plain.urls()], port, plain)


@contextmanager
def vllm_router_disaggregated(bench: Bench) -> Iterator[Serving]:
    """Run vLLM's router over one prefiller and two decoders, which move KV by vLLM's NixlConnector."""
    binary, port = bench.path("vllm-router", "bin", "vllm-router"), free_port(HOST)
    nixl = None if importlib.util.find_spec("nixl") else bench.path("nixl")
    with PlainEngines(bench, {"PYTHONPATH": str(nixl)} if nixl else {}) as engines:
        first, *others = engines.urls()
        command = [str(binary), "--vllm-pd-disaggregation", "--prefill", first, "none"]
        for url in others:
            command += ["--decode", url]
        yield from router(bench, "vllm-router-pd", command, port, engines)


def router(
    bench: Bench, name: str, command: Sequence[str], port: int, plain: PlainEngines
) -> Iterator[Serving]:
    """Run a router over the `plain` engines that sends requests where their prefix is; yield its address."""
    options = ["--policy", "cache_aware", "--host", HOST, "--port", str(port)]
    options += ["--prometheus-port", str(free_port(HOST))]
    subject = Subject(name, [*command, *options], port, start_limit_s=ROUTER_LIMIT_S)
    try:
        url = bench.ready(subject)
        yield Serving(url, {f"plain-{number}": one for number, one in enumerate(plain.urls())})
    finally:
        subject.stop()
