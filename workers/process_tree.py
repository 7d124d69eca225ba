"""End processes by pid, whole trees, without ever touching a process that only inherited a pid."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

import psutil


def find(pid: int, started: float) -> psutil.Process | None:
    """The process of that pid and start time, or None when it is gone (a zombie is gone)."""
    try:
        process = psutil.Process(pid)
        # A second of tolerance: start times are computed from the boot time, which can shift a little.
        if abs(process.create_time() - started) > 1.0 or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    return process


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def tree(root: psutil.Process) -> list[psutil.Process]:
    """The root, its descendants, and what is left of its session when it leads one."""
    try:
        found = {process.pid: process for process in (root, *root.children(recursive=True))}
    except psutil.Error:
        found = {root.pid: root}
    for process in session(root.pid):
        found.setdefault(process.pid, process)
    return list(found.values())


def end(processes: Iterable[psutil.Process], grace_s: float) -> bool:
    """Ask, wait `grace_s`, kill; says whether all of them are gone."""
    remaining = [process for process in processes if _running(process)]
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    remaining = _wait(remaining, grace_s)
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return not _wait(remaining, 5.0)


def session(leader: int) -> Iterator[psutil.Process]:
    """Every process of the session that `leader` leads or led.

    The kernel gives a pid to nobody else while a session of that number exists, so a leader that was killed
    still names what it left behind.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == leader and alive(process.pid):
                yield process


def _wait(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + limit_s
    while (
        processes := [process for process in processes if _running(process)]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes


def _running(process: psutil.Process) -> bool:
    return bool(process.is_running()) and alive(process.pid)
