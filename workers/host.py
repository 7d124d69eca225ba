"""python -m workers.host: run one command for as long as somebody renews its lease.

The host of an engine leads a session of its own, so it outlives its keeper: a restarted keeper adopts it with
all its KV. A lease that nobody renews ends the whole tree, so nothing is ever left behind. The lease is a
file: its modification time changes when it is renewed; removing it ends the tree at once.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from kvtransfer.parent_death import die_with_parent
from workers.processes import WorkerError, end, tree

LOOK_EVERY_S = 0.25
PR_SET_CHILD_SUBREAPER = 36


class Lease:
    """Runs out `seconds` after the last change seen, by our own clock: the system's may jump."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file, seconds
        self._seen = self._renewals()
        self._until = time.monotonic() + seconds

    def held(self) -> bool:
        renewals = self._renewals()
        if renewals is None:
            return False
        if renewals != self._seen:
            self._seen = renewals
            self._until = time.monotonic() + self._seconds
        return time.monotonic() < self._until

    def _renewals(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return None


class AskedToEnd(WorkerError):
    """Somebody asked this host to end."""


def run(argv: list[str], lease: Lease, grace_s: float) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans of the tree become ours: when vLLM's front end dies, its engine process stays findable.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,  # noqa: PLW1509, one thread
    )
    try:
        while child.poll() is None:
            if not lease.held():
                _say(f"nobody renewed the lease: ending {argv[0]}")
                return 3
            time.sleep(LOOK_EVERY_S)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode
    except AskedToEnd:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end((one for one in tree(psutil.Process()) if one.pid != os.getpid()), grace_s)


def _end(_signal: int, _frame: object) -> None:
    raise AskedToEnd


def _say(text: str) -> None:
    print(f"conserve host: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.host", description=__doc__)
    parser.add_argument("--lease", type=Path, required=True, help="file that is touched to renew the lease")
    parser.add_argument("--lease-s", type=float, required=True, help="seconds a renewal lasts")
    parser.add_argument("--grace-s", type=float, default=10.0, help="seconds from asking to killing")
    parser.add_argument("argv", nargs=argparse.REMAINDER, help="-- and the command to run")
    arguments = parser.parse_args()
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not argv:
        parser.error("a command is needed after --")
    if os.getsid(0) != os.getpid():
        os.setsid()
    return run(argv, Lease(arguments.lease, arguments.lease_s), arguments.grace_s)


if __name__ == "__main__":
    sys.exit(main())
