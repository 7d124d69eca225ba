"""Ends a fleet: its supervisor, then engines and gateways, then all other processes that bear its mark."""

import contextlib
import logging
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil

from deploy.errors import LifecycleError
from deploy.fleet import load_fleet
from deploy.home import FleetHome, RunRecord
from deploy.ray.cluster import connect, remove_temporary_directory, temporary_directory
from deploy.ray.common import AUTOSCALER, DIRECTORY, GATEWAYS, engines_of, keeper_name
from workers import processes
from workers.keeper.launch import FLEET_MARK
from workers.keeper.process_lease import recorded_below

log = logging.getLogger("conserve.deploy.down")

SUPERVISOR_LIMIT_S = 40.0
GRACE_S = 10.0
END_LIMIT_S = 60.0
ANSWER_LIMIT_S = 5.0
RAY_LOGS = "session_latest/logs"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore signals in this context, so that a second Ctrl-C does not interrupt the end of a fleet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_actors(home: FleetHome, run: RunRecord) -> None:
    """End the fleet's actors in a Ray cluster that is not ours and continues to run."""
    fleet = load_fleet(home.fleet_file)
    ray = connect(fleet, home, run)
    try:
        handles = {}
        keepers = map(keeper_name, engines_of(ray.util.list_named_actors()))
        for name in (AUTOSCALER, GATEWAYS, *keepers, DIRECTORY):
            with contextlib.suppress(ValueError):  # there is no actor of that name
                handles[name] = ray.get_actor(name)
        with contextlib.suppress(KeyError):
            ray.kill(handles.pop(AUTOSCALER), no_restart=True)  # first, or it would start new engines
        there = _answering(ray, handles)
        directory = handles.get(DIRECTORY)  # is ended last, so that it hears of engines that end
        for some in ([one for one in there if one != directory], [one for one in there if one == directory]):
            ending = [handle.end.remote() for handle in some]
            if ending:  # actors that do not end are killed next; their processes end with their leases
                ray.wait(ending, num_returns=len(ending), timeout=END_LIMIT_S)
        for handle in handles.values():
            ray.kill(handle, no_restart=True)
    finally:
        ray.shutdown()


def _answering(ray: Any, handles: dict[str, Any]) -> list[Any]:
    """Return the `handles` whose actors answer; a call to an actor on a lost node would block."""
    asked = {handle.__ray_ready__.remote(): handle for handle in handles.values()}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_LIMIT_S) if asked else ([], [])
    return [asked[one] for one in ready]


def bring_down(home: FleetHome) -> int:
    """End every process of the fleet on this machine, and return their number. Nothing but KV is lost."""
    with uninterrupted():
        return _bring_down(home)


def _bring_down(home: FleetHome) -> int:
    before = {process.pid for process in marked(home)}
    run = home.read_run()
    if run is not None:
        home.write_run(replace(run, ending=True))  # a `conserve up` that waits for engines reads it
    supervisor = processes.find(run.pid, run.started) if run and run.pid else None
    if run is not None and run.pid == 0:
        try:
            end_actors(home, run)
        except LifecycleError as error:
            log.warning("%s; engines elsewhere end by their lease, what runs on this machine ends now", error)
    if supervisor is not None:  # it may be a zombie for long, if its parent is a `conserve up` elsewhere
        processes.end([supervisor], SUPERVISOR_LIMIT_S)
    _end_leased(home)
    _sweep(home)
    shutil.rmtree(home.ray / "gcs", ignore_errors=True)  # a new cluster must not know the actors of this one
    if run is not None and not run.endpoint:  # the start failed: keep Ray's logs, which may say why
        with contextlib.suppress(OSError):
            shutil.copytree(temporary_directory(home) / RAY_LOGS, home.ray / "logs", dirs_exist_ok=True)
    remove_temporary_directory(home)
    home.run_file.unlink(missing_ok=True)
    return len(before)


def marked(home: FleetHome) -> list[psutil.Process]:
    """Return every other process with this fleet's mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != psutil.Process().pid and process.environ().get(FLEET_MARK) == home.mark:
                found.append(process)
    return found


def _end_leased(home: FleetHome) -> None:
    """Expire the leases of engines, gateways and directory, so that they end together, and wait for each."""
    left = recorded_below(home.engines, home.gateways, home.directory)
    for process in left:
        process.expire()
    for process in left:
        process.end(GRACE_S)


def _sweep(home: FleetHome) -> None:
    deadline = time.monotonic() + GRACE_S
    while (left := marked(home)) and time.monotonic() < deadline:
        processes.end(left, 2.0)
