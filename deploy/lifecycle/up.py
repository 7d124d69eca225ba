"""Starts a fleet (Ray, keepers, directory, gateways), reports progress, and explains a start that fails."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import yaml

from deploy.errors import ActorLost, LifecycleError
from deploy.fleet import FleetSpec
from deploy.fleet.engine_arguments import engine_resources
from deploy.fleet.schema import TierSpec
from deploy.home import FleetHome, RunRecord
from deploy.lifecycle.down import bring_down
from deploy.lifecycle.endpoint import endpoint_of, trust_of
from deploy.models.built_in import ensure_model, fetch_model
from deploy.ray.cluster import connect, refuse_open_cluster, start_own_cluster
from deploy.ray.common import replica
from router.directory import journal
from router.http import descriptors_problem
from workers import processes
from workers.keeper.engine_status import KeeperPhase, KeeperStatus
from workers.processes import write_atomically

Tell = Callable[[str], None]

CALL_LIMIT_S = 120.0
GATEWAY_LIMIT_S = 60.0
PLACE_LIMIT_S = 15.0
POLL_S = 0.5


def prepare(fleet: FleetSpec, home: FleetHome, tell: Tell) -> None:
    clear_the_way(fleet, home)
    home.create()
    write_fleet(fleet, home)
    ensure_model(fleet, home, tell)


def clear_the_way(fleet: FleetSpec, home: FleetHome) -> None:
    """End the processes that a killed run has left, and refuse a start that cannot succeed."""
    refuse_missing_model(fleet)
    if home.read_run() is not None:
        bring_down(home)  # a killed run may have left processes
    if home.journal.exists():
        journal.check(home.journal)  # with a damaged journal the directory would end again and again
    refuse_few_descriptors(fleet)
    refuse_taken_port(fleet)


def write_fleet(fleet: FleetSpec, home: FleetHome) -> None:
    """Save the fleet that is brought up as the fleet file in its home."""
    content = fleet.model_dump(mode="json", exclude_unset=True)
    write_atomically(home.fleet_file, yaml.safe_dump(content, sort_keys=False))


def is_up(home: FleetHome) -> bool:
    """Return whether a fleet may be up. On a Ray cluster that is not ours, its run record alone counts."""
    run = home.read_run()
    return run is not None and (run.pid == 0 or processes.find(run.pid, run.started) is not None)


def refuse_taken_port(fleet: FleetSpec) -> None:
    gateway = fleet.gateway
    if problem := processes.listen_problem(gateway.host, gateway.port):
        where = f"{gateway.host}:{gateway.port} ({problem})"
        raise LifecycleError(
            f"the gateway cannot listen on {where}: end what is there, or choose another port (--port, or "
            "gateway.port in the fleet file)"
        )


def refuse_few_descriptors(fleet: FleetSpec) -> None:
    """Refuse to start if this machine allows a gateway fewer open files than its connections take."""
    if problem := descriptors_problem(fleet.gateway.limits.connections):
        raise LifecycleError(problem)


def refuse_missing_model(fleet: FleetSpec) -> None:
    """Refuse a model directory that is missing on this machine; engines check other machines and the Hub."""
    path = fleet.model.path
    is_path = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    if fleet.ray.address is None and is_path and not (Path(path).expanduser() / "config.json").is_file():
        raise LifecycleError(
            f"model.path: there is no model in {Path(path).expanduser().absolute()}; it must be a directory "
            "with config.json, a Hugging Face id as in Qwen/Qwen3-0.6B, or `smollm2`"
        )


def refuse_what_does_not_fit(fleet: FleetSpec, there: Mapping[str, float]) -> None:
    """Refuse tiers that need more than our own cluster has. A cluster that is not ours may still grow."""
    if fleet.ray.address is not None:
        return
    takes = {tier.name: engine_resources(fleet, tier) for tier in fleet.tiers}
    for name in sorted({name for each in takes.values() for name in each}):
        takers = [tier for tier in fleet.tiers if tier.replicas and name in takes[tier.name]]
        wanted = sum(takes[tier.name][name] * tier.replicas for tier in takers)
        if wanted > there.get(name, 0):
            tiers = " and ".join(f"{tier.replicas} x {tier.name}" for tier in takers)
            raise LifecycleError(
                f"{tiers} take {wanted:g} {name}, and this machine has {there.get(name, 0):g}: lower "
                "replicas or resources of these tiers, or name a larger Ray cluster in ray.address"
            )


def bring_up(fleet: FleetSpec, home: FleetHome, tell: Tell, *, end_with_us: bool) -> str:
    """Start a fleet and return its endpoint. A failure or an interrupt leaves no process behind."""
    prepare(fleet, home, tell)
    try:
        if fleet.ray.address is None:
            tell("starting Ray")
            record = start_own_cluster(fleet, home, end_with_us)
        else:
            record = RunRecord(0, 0.0, fleet.ray.address)
            home.write_run(record)
        ray = connect(fleet, home, record)
        try:
            refuse_open_cluster(ray)
            refuse_what_does_not_fit(fleet, ray.cluster_resources())
            fetch_model(fleet, tell)
            return _start(ray, fleet, home, record, tell)
        finally:
            ray.shutdown()
    except BaseException as error:  # also after Ctrl-C, because the started processes would run on
        try:
            elsewhere = ended_elsewhere(home, error)
        finally:
            bring_down(home)
        if elsewhere:
            raise LifecycleError("the fleet was ended from elsewhere while it started") from error
        raise


def ended_elsewhere(home: FleetHome, error: BaseException) -> bool:
    """Return whether `error` arose because another command ended the fleet or its supervisor was killed."""
    if not isinstance(error, LifecycleError | ConnectionError):
        return False
    run = home.read_run()
    if run is None or run.ending:
        return True
    supervised = run.pid == 0 or processes.find(run.pid, run.started) is not None
    return isinstance(error, ActorLost | ConnectionError) and not supervised


def _start(ray: Any, fleet: FleetSpec, home: FleetHome, record: RunRecord, tell: Tell) -> str:
    from deploy.lifecycle.actors import Actors  # imports Ray, whose environment is complete only now

    actors = Actors(fleet, home)
    keepers = actors.start_keepers()
    address = directory_address(ray, actors.start_directory())
    home.write_run(replace(record, directory=address))  # `conserve status` may ask it from now on
    gateways = actors.start_gateways(address)
    until_engines_serve(ray, fleet, keepers, home, tell)
    tell("waiting for the gateway")
    until_gateway_answers(ray, gateways, fleet, home)
    actors.start_autoscaler(address)
    home.write_run(replace(record, directory=address, endpoint=endpoint_of(fleet)))
    return endpoint_of(fleet)


def directory_address(ray: Any, directory: Any) -> str:
    deadline = time.monotonic() + CALL_LIMIT_S
    while time.monotonic() < deadline:
        address = _ask(ray, directory.address.remote(), "the directory")
        if address:
            return str(address)
        time.sleep(0.1)
    raise LifecycleError("the directory did not begin to listen; see directory/log in the fleet's folder")


def until_engines_serve(
    ray: Any, fleet: FleetSpec, keepers: dict[str, Any], home: FleetHome, tell: Tell
) -> None:
    """Wait until all engines serve, or raise if one fails. Keepers limit how long a start may take."""
    shown: dict[str, str] = {}
    unplaced_until = time.monotonic() + fleet.engine.start_limit
    while True:
        statuses = {name: _status(ray, keeper, name) for name, keeper in keepers.items()}
        for name, status in statuses.items():
            line = _line(status, fleet, name)
            if shown.get(name) != line:
                shown[name] = line
                tell(f"{name}: {line}")
            if status is not None and status.failure:
                raise LifecycleError(_failure(name, status, home))
            if status is None and time.monotonic() > unplaced_until:
                raise LifecycleError(
                    f"engine {name} was not placed within {fleet.engine.start_limit:.0f} s: {line}; "
                    "`ray status` shows what its nodes have"
                )
        if all(status is not None and status.phase is KeeperPhase.SERVING for status in statuses.values()):
            return
        time.sleep(POLL_S)


def _status(ray: Any, keeper: Any, name: str) -> KeeperStatus | None:
    """Return the status of the keeper of engine `name`; None until Ray has placed its actor on a node."""
    try:
        status: KeeperStatus = ray.get(keeper.status.remote(), timeout=PLACE_LIMIT_S)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        raise ActorLost(f"the keeper of {name} failed: {_last_line(error)}") from error
    return status


def _line(status: KeeperStatus | None, fleet: FleetSpec, engine: str) -> str:
    if status is None:
        tier = _tier(fleet, engine)
        wanted = engine_resources(fleet, tier) if tier else {}
        return f"waiting for a node with {wanted or 'its resources'}"
    return f"{status.phase}: {status.detail}" if status.detail else str(status.phase)


def _tier(fleet: FleetSpec, engine: str) -> TierSpec | None:
    return next((tier for tier in fleet.tiers if tier.name == replica(engine)[0]), None)


def _failure(name: str, status: KeeperStatus, home: FleetHome) -> str:
    lines = "\n".join(f"    {line}" for line in status.log_lines[-12:])
    return f"engine {name} cannot start: {status.failure}\n  the end of {home.engine(name) / 'log'}:\n{lines}"


def until_gateway_answers(ray: Any, gateways: Any, fleet: FleetSpec, home: FleetHome) -> None:
    endpoint, trust = endpoint_of(fleet), trust_of(fleet)
    deadline = time.monotonic() + GATEWAY_LIMIT_S
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{endpoint}/ready", timeout=2, context=trust) as answer:
                if answer.status == 200:
                    return
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.read(300).decode(errors='replace')}"
        except (OSError, HTTPException) as error:
            reason = str(error)
        _ask(ray, gateways.pids.remote(), "the gateways' actor")
        time.sleep(0.2)
    raise LifecycleError(f"the gateway at {endpoint} is not ready: {reason}; see {home.gateways}/*/log")


def _ask(ray: Any, reference: Any, who: str) -> Any:
    try:
        return ray.get(reference, timeout=CALL_LIMIT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise LifecycleError(
            f"{who} does not start: no node of Ray has the resources it takes, or the node is overloaded"
        ) from error
    except ray.exceptions.RayError as error:
        raise ActorLost(f"{who} failed: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """Return the last line of Ray's message that is not indented; the indented lines are ids."""
    lines = str(error).strip().splitlines()
    return next((line for line in reversed(lines) if not line.startswith(("\t", " "))), repr(error))
