"""What a fleet is doing: what its directory knows, and what the keepers on this machine say. Needs no Ray."""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deploy.fleet import Fleet, load_fleet
from deploy.fleet.rooms import EngineName, engines
from deploy.home import FleetHome, RunRecord
from deploy.lifecycle import directory
from deploy.lifecycle.errors import LifecycleError
from deploy.ray.names import replica
from router.directory import directory_pb2 as pb
from workers import process_tree
from workers.board import Change
from workers.control.client import ControlClient, ControlError

LIMIT_S = 3.0
CONTROL_FILE = "control"


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


@dataclass(frozen=True, slots=True)
class FleetStatus:
    fleet: str
    endpoint: str
    directory: str
    supervised: bool  # whether Ray's supervisor on this machine runs
    reachable: bool  # whether the directory answered
    engines: tuple[EngineStatus, ...]
    metrics: str = ""  # host:port of the directory's page
    gateways: tuple[str, ...] = ()  # and of each gateway process's

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def running(home: FleetHome) -> RunRecord:
    run = home.read_run()
    if run is None:
        raise LifecycleError(f"fleet '{home.root.name}' is not up; start it with: conserve up FILE")
    return run


def fleet_status(home: FleetHome) -> FleetStatus:
    run = running(home)
    fleet = load_fleet(home.fleet_file)
    reply, told, present = asyncio.run(_ask_all(home, fleet, run.directory))
    known = _by_name(reply)
    return FleetStatus(
        fleet=fleet.name,
        endpoint=run.endpoint,
        directory=run.directory,
        supervised=bool(run.pid and process_tree.find(run.pid, run.started)),
        reachable=reply is not None,
        metrics=reply.metrics if reply is not None else "",
        gateways=tuple(reply.gateways) if reply is not None else (),
        engines=tuple(_engine(engine, told.get(engine.name), known.get(engine.name)) for engine in present),
    )


async def _ask_all(
    home: FleetHome, fleet: Fleet, address: str
) -> tuple[pb.EnginesReply | None, dict[str, Change], list[EngineName]]:
    secret = home.secret()
    reply = await directory.engines(address, secret) if address else None
    known = _by_name(reply)
    present = _present(fleet, home, known)
    told = {}
    for engine in present:
        file = home.engine(engine.name) / CONTROL_FILE
        control = known[engine.name].control if engine.name in known else ""
        control = control or (file.read_text() if file.exists() else "")
        if control:
            try:
                async with ControlClient(control, secret, LIMIT_S) as client:
                    told[engine.name] = await client.info()
            except ControlError:
                continue  # shown as unreachable
    return reply, told, present


def _by_name(reply: pb.EnginesReply | None) -> dict[str, pb.Engine]:
    return {engine.engine: engine for engine in reply.engines.engines} if reply is not None else {}


def _present(fleet: Fleet, home: FleetHome, known: Iterable[str]) -> list[EngineName]:
    """Those of the file; of a tier that follows the load, those that the directory knows or that have a
    keeper on this machine."""
    found = [engine for engine in engines(fleet) if engine.tier.autoscale is None]
    keepers = {file.parent.name for file in home.engines.glob(f"*/{CONTROL_FILE}")}
    for tier in fleet.tiers:
        if tier.autoscale is not None:
            names = [name for name in {*known, *keepers} if replica(name)[0] == tier.name]
            found += [EngineName(name, tier) for name in sorted(names, key=replica)]
    return found


def _engine(engine: EngineName, told: Change | None, known: pb.Engine | None) -> EngineStatus:
    values: dict[str, Any] = {"phase": "unreachable"}
    if told is not None and told.status is not None:
        status = told.status
        values = {
            "phase": str(status.phase),
            "detail": status.detail,
            "pid": status.pid,
            "epoch": status.epoch,
            "restarts": status.restarts,
            "failure": status.failure,
            "metrics": status.metrics,
        }
    if known is not None:
        for field in ("http", "control", "kv_tokens", "live_tokens", "parked_tokens"):
            values[field] = getattr(known, field)
        for field in ("running", "waiting", "conversations", "draining"):
            values[field] = getattr(known, field)
        values["epoch"] = known.epoch
    return EngineStatus(engine=engine.name, tier=engine.tier.name, role=str(engine.tier.role), **values)
