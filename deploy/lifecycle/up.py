"""Bring a fleet up: Ray, keepers, directory, gateways; tell of progress; give up with a reason."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from deploy.fleet import Fleet
from deploy.fleet.schema import Tier
from deploy.home import FleetHome, RunRecord
from deploy.lifecycle.cluster import connect, start_own_cluster
from deploy.lifecycle.down import bring_down
from deploy.lifecycle.errors import LifecycleError
from deploy.lifecycle.prepare import prepare, refuse_what_does_not_fit
from deploy.ray.names import replica
from workers.board import Phase, Status

Tell = Callable[[str], None]

CALL_LIMIT_S = 120.0
GATEWAY_LIMIT_S = 60.0
PLACE_LIMIT_S = 15.0
LOOK_EVERY_S = 0.5


def bring_up(fleet: Fleet, home: FleetHome, tell: Tell, *, end_with_us: bool) -> str:
    """Returns the endpoint. If it cannot, or is interrupted, nothing is left behind."""
    prepare(fleet, home)
    with _down_on_failure(home):
        if fleet.ray.address is None:
            tell("starting Ray")
            record = start_own_cluster(fleet, home, end_with_us)
        else:
            record = RunRecord(0, 0.0, fleet.ray.address)
            home.write_run(record)
        ray = connect(fleet, home, record)
        try:
            directory, endpoint = _start(ray, fleet, home, tell)
        finally:
            ray.shutdown()
        home.write_run(replace(record, directory=directory, endpoint=endpoint))
        return endpoint


def _start(ray: Any, fleet: Fleet, home: FleetHome, tell: Tell) -> tuple[str, str]:
    from deploy.lifecycle.actors import Actors  # imports Ray, whose environment is complete only now

    refuse_what_does_not_fit(fleet, ray.cluster_resources())
    actors = Actors(fleet, home)
    keepers = actors.start_keepers()
    address = directory_address(ray, actors.start_directory())
    gateways = actors.start_gateways(address)
    until_engines_serve(ray, fleet, keepers, home, tell)
    tell("waiting for the gateway")
    until_gateway_answers(ray, gateways, endpoint_of(fleet), home)
    actors.start_autoscaler(address)
    return address, endpoint_of(fleet)


def endpoint_of(fleet: Fleet) -> str:
    return f"http://{_reachable(fleet.gateway.host)}:{fleet.gateway.port}"


def directory_address(ray: Any, directory: Any) -> str:
    deadline = time.monotonic() + CALL_LIMIT_S
    while time.monotonic() < deadline:
        address = _ask(ray, directory.address.remote(), "the directory")
        if address:
            return str(address)
        time.sleep(0.1)
    raise LifecycleError("the directory did not come to listen")


def until_engines_serve(ray: Any, fleet: Fleet, keepers: dict[str, Any], home: FleetHome, tell: Tell) -> None:
    """Keepers bound their own starts, so this ends. The first failure ends it too."""
    told: dict[str, str] = {}
    unplaced_until = time.monotonic() + fleet.engine.start_limit
    while True:
        statuses = {name: _status(ray, keeper, name) for name, keeper in keepers.items()}
        for name, status in statuses.items():
            line = _line(status, _tier(fleet, name))
            if told.get(name) != line:
                told[name] = line
                tell(f"{name}: {line}")
            if status is not None and status.failure:
                raise LifecycleError(_failure(name, status, home))
            if status is None and time.monotonic() > unplaced_until:
                raise LifecycleError(
                    f"engine {name} was not placed within {fleet.engine.start_limit:.0f} s: {line}; "
                    "`ray status` shows what its nodes have"
                )
        if all(status is not None and status.phase is Phase.SERVING for status in statuses.values()):
            return
        time.sleep(LOOK_EVERY_S)


def _status(ray: Any, keeper: Any, name: str) -> Status | None:
    """None: Ray has not found a place for it yet."""
    try:
        status: Status = ray.get(keeper.status.remote(), timeout=PLACE_LIMIT_S)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        raise LifecycleError(f"the keeper of {name} failed: {_last_line(error)}") from error
    return status


def _line(status: Status | None, tier: Tier | None) -> str:
    if status is None:
        wanted = f"{tier.resources}" if tier and tier.resources else "its resources"
        return f"waiting for a node with {wanted}"
    return f"{status.phase}: {status.detail}" if status.detail else str(status.phase)


def _tier(fleet: Fleet, engine: str) -> Tier | None:
    return next((tier for tier in fleet.tiers if tier.name == replica(engine)[0]), None)


def _failure(name: str, status: Status, home: FleetHome) -> str:
    lines = "\n".join(f"    {line}" for line in status.log_lines[-12:])
    return f"engine {name} cannot start: {status.failure}\n  the end of {home.engine(name) / 'log'}:\n{lines}"


def until_gateway_answers(ray: Any, gateways: Any, endpoint: str, home: FleetHome) -> None:
    deadline = time.monotonic() + GATEWAY_LIMIT_S
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{endpoint}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.read(300).decode(errors='replace')}"
        except OSError as error:
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
        raise LifecycleError(f"{who} failed: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """Of what Ray says; its indented lines are ids."""
    lines = str(error).strip().splitlines()
    return next((line for line in reversed(lines) if not line.startswith(("\t", " "))), repr(error))


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


@contextmanager
def _down_on_failure(home: FleetHome) -> Iterator[None]:
    try:
        yield
    except BaseException:  # Ctrl-C too: what has started would go on without us
        bring_down(home)
        raise
