"""Bring a fleet down: what supervises first, then engines and gateways, then all else that has its mark."""

import contextlib
import logging
import shutil
import time
from pathlib import Path

import psutil

from deploy.home import FleetHome
from deploy.lifecycle.errors import LifecycleError
from deploy.lifecycle.foreign import end_actors
from deploy.lifecycle.uninterrupted import uninterrupted
from deploy.ray.own_cluster import temporary_directory
from workers import process_tree
from workers.command import FLEET_MARK
from workers.leased import LEASE, RECORD, LeasedProcess, Record

log = logging.getLogger("conserve.deploy.down")

SUPERVISOR_LIMIT_S = 40.0
GRACE_S = 10.0


def bring_down(home: FleetHome) -> int:
    """End every process of the fleet on this machine; returns how many ended. Nothing is lost but KV."""
    with uninterrupted():
        return _bring_down(home)


def _bring_down(home: FleetHome) -> int:
    before = {process.pid for process in marked(home)}
    run = home.read_run()
    supervisor = process_tree.find(run.pid, run.started) if run and run.pid else None
    if run is not None and run.pid == 0:
        try:
            end_actors(home, run)
        except LifecycleError as error:
            log.warning("%s; engines elsewhere end by their lease, what runs on this machine ends now", error)
    if supervisor is not None:
        with contextlib.suppress(psutil.Error):
            supervisor.terminate()
            supervisor.wait(SUPERVISOR_LIMIT_S)
    _end_leased([*home.engines.glob("*/"), *home.gateways.glob("*/")])
    _sweep(home)
    shutil.rmtree(home.ray / "gcs", ignore_errors=True)  # a new cluster must not know the actors of this one
    if run is not None and run.endpoint:  # else somebody will want the logs of the failed start
        shutil.rmtree(temporary_directory(home), ignore_errors=True)
    home.run_file.unlink(missing_ok=True)
    return len(before)


def marked(home: FleetHome) -> list[psutil.Process]:
    """Every process with this fleet's mark in its environment, ourselves excepted."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != psutil.Process().pid and process.environ().get(FLEET_MARK) == home.mark:
                found.append(process)
    return found


def _end_leased(directories: list[Path]) -> None:
    """First all leases, so that all end at the same time; then wait for each."""
    for directory in directories:
        (directory / LEASE).unlink(missing_ok=True)
    for directory in directories:
        record = Record.read(directory / RECORD)
        if record is not None:
            LeasedProcess(directory, record).end(GRACE_S)


def _sweep(home: FleetHome) -> None:
    deadline = time.monotonic() + GRACE_S
    while (left := marked(home)) and time.monotonic() < deadline:
        process_tree.end(left, 2.0)
