"""Collects the status of a fleet that is up, and the addresses of its metric pages.

The status joins what the directory knows with the reports of the keepers on this machine. It needs no Ray.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import grpc

from deploy.errors import LifecycleError
from deploy.fleet import FleetSpec, components, load_fleet
from deploy.fleet.components import EngineName
from deploy.home import CONTROL_FILE, FleetHome, FleetKeys, Purpose, RunRecord
from deploy.ray.common import replica
from deploy.ray.control import ControlClient, ControlError
from router.directory.api import messages
from router.directory.api.rpc import BadReply, Method, Stub
from workers import processes
from workers.keeper.engine_status import KeeperReport
from workers.processes import write_atomically

LIMIT_S = 3.0

Reply = TypeVar("Reply")


def keys_of(fleet: FleetSpec, home: FleetHome) -> FleetKeys:
    """Return the fleet's keys, derived from the token of the Ray cluster on which the fleet runs."""
    if fleet.ray.address is not None:
        return FleetKeys.here(home.name)
    return FleetKeys(home.ray_token().read_text().strip(), home.name)


async def directory_status(address: str, secret: str) -> messages.DirectoryStatus | None:
    """Return the directory's status, or None if it does not answer."""
    return await _ask(address, secret, messages.STATUS)


async def capacity(address: str, secret: str) -> messages.CapacityReport | None:
    """Return the directory's capacity report, or None if it does not answer."""
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
    gateways: tuple[str, ...] = ()  # host:port of the gateways' pages
    batch: tuple[str, ...] = ()  # host:port of the batch process's page, if it runs
    starting: bool = False  # `conserve up` has not ended yet
    seconds: float = 0.0  # since Ray's supervisor started; 0 if Ray is not ours
    lost: bool = False  # whether Ray's supervisor should run and does not
    journal_problem: str = ""  # why the directory refuses new conversations


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
    reply, reports, present = asyncio.run(_ask_all(home, fleet, run.directory))
    known = _by_name(reply)
    supervised = bool(run.pid and processes.find(run.pid, run.started))
    starting = not run.endpoint and (supervised or not run.pid)
    engines = (
        _engine(engine, starting, reports.get(engine.name), known.get(engine.name)) for engine in present
    )
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
        journal_problem=reply.journal_problem if reply is not None else "",
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

    answers = await asyncio.gather(*(info(engine.name) for engine in present))
    reports = {engine.name: report for engine, report in zip(present, answers, strict=True) if report}
    return reply, reports, present


def _by_name(reply: messages.DirectoryStatus | None) -> dict[str, messages.EngineRecord]:
    return {record.info.engine: record for record in reply.engines} if reply is not None else {}


def _present(fleet: FleetSpec, home: FleetHome, known: Iterable[str]) -> list[EngineName]:
    """Return the file's engines; of autoscaled tiers, those in `known` or with a keeper on this machine."""
    found = [engine for engine in components.engines(fleet) if engine.tier.autoscale is None]
    keepers = {file.parent.name for file in home.engines.glob(f"*/{CONTROL_FILE}")}
    for tier in fleet.tiers:
        if tier.autoscale is not None:
            names = [name for name in {*known, *keepers} if replica(name)[0] == tier.name]
            found += [EngineName(name, tier) for name in sorted(names, key=replica)]
    return found


def _engine(
    engine: EngineName, starting: bool, report: KeeperReport | None, known: messages.EngineRecord | None
) -> EngineStatus:
    sources: list[object] = [report and report.status, known, known and known.info, known and known.state]
    values: dict[str, Any] = {"phase": "not started yet" if starting else "unreachable"}
    names = [field.name for field in fields(EngineStatus)]
    for source in filter(None, sources):
        values |= {name: getattr(source, name) for name in names if hasattr(source, name)}
    values |= {"engine": engine.name, "tier": engine.tier.name, "role": engine.tier.role}
    return EngineStatus(**values)


# Metric pages, for the file discovery of Prometheus or its HTTP discovery.

Targets = list[dict[str, Any]]


def targets(status: FleetStatus) -> Targets:
    """Return the addresses of the metric pages of all of a fleet's processes, on all machines."""
    # Prometheus would rename a metric's label that has the name of one of these labels.
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
    """Write the target file atomically, because Prometheus reads it whenever it changes."""
    write_atomically(path, json.dumps(found, indent=1) + "\n")


def discovery(address: str, look: Callable[[], Targets]) -> ThreadingHTTPServer:
    """Return an HTTP server for Prometheus's `http_sd_configs`, which calls `look` for each request."""

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
