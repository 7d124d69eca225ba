"""A fleet that is up, as its machine sees it: what it is doing, its metric pages, its gateway's address.

What it is doing is what its directory knows, and what the keepers on this machine say. Needs no Ray.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from deploy.errors import LifecycleError
from deploy.fleet import FleetSpec, components, load_fleet
from deploy.fleet.components import EngineName
from deploy.home import FleetHome, FleetKeys, Purpose, RunRecord
from deploy.ray.common import replica
from deploy.ray.control import ControlClient, ControlError
from router.directory import messages
from router.directory.rpc import BadReply, Method, Stub
from workers import processes
from workers.keeper.engine_status import KeeperReport
from workers.processes import write_atomically

LIMIT_S = 3.0
CONTROL_FILE = "control"

Reply = TypeVar("Reply")


def keys_of(fleet: FleetSpec, home: FleetHome) -> FleetKeys:
    """For commands: a cluster of our own keeps its token with the fleet."""
    if fleet.ray.address is not None:
        return FleetKeys.here(home.name)
    return FleetKeys(home.ray_token().read_text().strip(), home.name)


async def directory_status(address: str, secret: str) -> messages.DirectoryStatus | None:
    """None: it does not answer."""
    return await _ask(address, secret, messages.STATUS)


async def capacity(address: str, secret: str) -> messages.CapacityReport | None:
    """None: it does not answer."""
    return await _ask(address, secret, messages.CAPACITY)


async def _ask(address: str, secret: str, method: Method[None, Reply]) -> Reply | None:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            return await Stub(channel, secret).ask(method, None, LIMIT_S)
        except (grpc.aio.AioRpcError, BadReply):
            return None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    engine: str
    tier: str
    role: str
    phase: str
    detail: str = ""
    pid: int = 0
    epoch: int = 0
    restarts: int = 0
    failure: str = ""
    http: str = ""
    control: str = ""
    kv_tokens: int = 0
    live_tokens: int = 0
    parked_tokens: int = 0
    running: int = 0
    waiting: int = 0
    conversations: int = 0
    draining: bool = False
    metrics: str = ""  # host:port of its keeper's page

    @property
    def in_words(self) -> str:
        state = "draining" if self.draining else self.phase
        detail = self.failure or self.detail
        return f"{state}: {detail}" if detail else state


@dataclass(frozen=True, slots=True)
class FleetStatus:
    fleet: str
    endpoint: str
    directory: str
    reachable: bool  # whether the directory answered
    engines: tuple[EngineStatus, ...]
    metrics: str = ""  # host:port of the directory's page
    gateways: tuple[str, ...] = ()  # and of each gateway process's
    batch: tuple[str, ...] = ()  # and of the batch process's
    starting: bool = False  # `conserve up` has not ended yet
    seconds: float = 0.0  # since the start of Ray's supervisor; 0: there is none here
    lost: bool = False  # whether that supervisor should run, and does not


def running(home: FleetHome) -> RunRecord:
    run = home.read_run()
    if run is None:
        raise LifecycleError(f"fleet '{home.name}' is not up; start it with: conserve up FILE")
    return run


def serving(home: FleetHome) -> RunRecord:
    run = running(home)
    if not run.endpoint:
        raise LifecycleError(f"fleet '{home.name}' is still starting: see conserve status {home.name}")
    return run


def fleet_status(home: FleetHome) -> FleetStatus:
    run = running(home)
    fleet = load_fleet(home.fleet_file)
    reply, told, present = asyncio.run(_ask_all(home, fleet, run.directory))
    known = _by_name(reply)
    supervised = bool(run.pid and processes.find(run.pid, run.started))
    starting = not run.endpoint and (supervised or not run.pid)
    engines = (_engine(engine, starting, told.get(engine.name), known.get(engine.name)) for engine in present)
    return FleetStatus(
        fleet=fleet.name,
        endpoint=run.endpoint,
        directory=run.directory,
        lost=bool(run.pid) and not supervised,
        starting=starting,
        seconds=time.time() - run.started if supervised else 0.0,
        reachable=reply is not None,
        metrics=reply.metrics if reply is not None else "",
        gateways=reply.gateways if reply is not None else (),
        batch=reply.batch if reply is not None else (),
        engines=tuple(engines),
    )


async def _ask_all(
    home: FleetHome, fleet: FleetSpec, address: str
) -> tuple[messages.DirectoryStatus | None, dict[str, KeeperReport], list[EngineName]]:
    keys = keys_of(fleet, home)
    reply = await directory_status(address, keys.of(Purpose.DIRECTORY)) if address else None
    known = _by_name(reply)
    present = _present(fleet, home, known)

    async def info(name: str) -> KeeperReport | None:
        file = home.engine(name) / CONTROL_FILE
        control = known[name].info.control if name in known else ""
        control = control or (file.read_text() if file.exists() else "")
        if not control:
            return None
        try:
            async with ControlClient(control, keys.of(Purpose.KEEPERS), LIMIT_S) as client:
                return await client.info()
        except ControlError:
            return None  # shown as unreachable

    reports = await asyncio.gather(*(info(engine.name) for engine in present))
    told = {engine.name: report for engine, report in zip(present, reports, strict=True) if report}
    return reply, told, present


def _by_name(reply: messages.DirectoryStatus | None) -> dict[str, messages.EngineRecord]:
    return {record.info.engine: record for record in reply.engines} if reply is not None else {}


def _present(fleet: FleetSpec, home: FleetHome, known: Iterable[str]) -> list[EngineName]:
    """Those of the file; of a tier that follows the load, those that the directory knows or that have a
    keeper on this machine."""
    found = [engine for engine in components.engines(fleet) if engine.tier.autoscale is None]
    keepers = {file.parent.name for file in home.engines.glob(f"*/{CONTROL_FILE}")}
    for tier in fleet.tiers:
        if tier.autoscale is not None:
            names = [name for name in {*known, *keepers} if replica(name)[0] == tier.name]
            found += [EngineName(name, tier) for name in sorted(names, key=replica)]
    return found


def _engine(
    engine: EngineName, starting: bool, told: KeeperReport | None, known: messages.EngineRecord | None
) -> EngineStatus:
    sources: list[object] = [told and told.status, known, known and known.info, known and known.state]
    values: dict[str, Any] = {"phase": "not started yet" if starting else "unreachable"}
    names = [field.name for field in fields(EngineStatus)]
    for source in filter(None, sources):
        values |= {name: getattr(source, name) for name in names if hasattr(source, name)}
    values |= {"engine": engine.name, "tier": engine.tier.name, "role": engine.tier.role}
    return EngineStatus(**values)


# Where Prometheus finds its pages: as its file discovery reads them, or its HTTP discovery asks.

Targets = list[dict[str, Any]]


def targets(status: FleetStatus) -> Targets:
    """As the directory and the keepers know them, on whichever machines they are."""
    # No label here may have the name of a label of our metrics: Prometheus would rename the metric's.
    found = [page_of(page, status.fleet, "gateway") for page in status.gateways]
    found += [page_of(page, status.fleet, "batch") for page in status.batch]
    found.append(page_of(status.metrics, status.fleet, "directory"))
    for engine in status.engines:
        labels = {"conserve_tier": engine.tier, "conserve_role": engine.role}
        found.append(page_of(engine.http, status.fleet, "engine", conserve_engine=engine.engine, **labels))
        found.append(page_of(engine.metrics, status.fleet, "keeper", conserve_engine=engine.engine, **labels))
    return [target for target in found if target["targets"] != [""]]


def page_of(address: str, fleet: str, process: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": {"conserve_fleet": fleet, "conserve_process": process, **labels}}


def write_targets(path: Path, found: Targets) -> None:
    """In one step: Prometheus reads the file whenever it changes."""
    write_atomically(path, json.dumps(found, indent=1) + "\n")


def discovery(address: str, look: Callable[[], Targets]) -> ThreadingHTTPServer:
    """A server for `http_sd_configs`, which looks anew for every request; `serve_forever` runs it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, body = 200, json.dumps(look()).encode()
            except LifecycleError as down:  # Prometheus keeps the pages it knew
                status, body = 503, str(down).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json" if status == 200 else "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    host, _, port = address.rpartition(":")
    return ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)


# Where its gateway is called from its own machine, and by which certificate it is known there.


def endpoint_of(fleet: FleetSpec) -> str:
    scheme = "https" if fleet.gateway.tls is not None else "http"
    return f"{scheme}://{_reachable(fleet)}:{fleet.gateway.port}"


def trust_of(fleet: FleetSpec) -> ssl.SSLContext | None:
    """None where it speaks plain HTTP, or its certificate is on another machine: what the system trusts.

    Else the gateway's very certificate, under whatever name it is called: nobody else has the key of it."""
    leaf = _certificate(fleet)
    if leaf is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=leaf.public_bytes(Encoding.PEM).decode())
    return context


def curl(fleet: FleetSpec) -> str:
    """`curl` up to the address: under a name that the certificate has, and trusting it."""
    leaf, endpoint = _certificate(fleet), endpoint_of(fleet)
    if leaf is None or fleet.gateway.tls is None:
        return f"curl {endpoint}"
    trusting = f"curl --cacert {Path(fleet.gateway.tls.cert).expanduser()}"
    host, port = _reachable(fleet), fleet.gateway.port
    names = _names(leaf)
    name = next((one for one in names if not one.startswith("*")), host)
    if host in names or name == host:
        return f"{trusting} {endpoint}"
    return f"{trusting} --resolve {name}:{port}:{host} https://{name}:{port}"


def _certificate(fleet: FleetSpec) -> x509.Certificate | None:
    file = Path(fleet.gateway.tls.cert).expanduser() if fleet.gateway.tls is not None else None
    return x509.load_pem_x509_certificate(file.read_bytes()) if file is not None and file.exists() else None


def _names(leaf: x509.Certificate) -> list[str]:
    try:
        said = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    kinds = (x509.DNSName, x509.IPAddress)
    return [str(one) for kind in kinds for one in said.get_values_for_type(kind)]


def _reachable(fleet: FleetSpec) -> str:
    host = fleet.gateway.host
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    try:
        return f"[{host}]" if ip_address(host).version == 6 else host
    except ValueError:
        return host
