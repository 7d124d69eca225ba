"""python -m workers.host: runs one command until it ends or its lease expires.

The host of an engine leads a session of its own and so outlives its keeper: a restarted keeper adopts the
engine with all its KV. The lease is a file. The keeper renews it by changing its modification time, and
removes it to end the whole process tree immediately. While the supervisor of the fleet's keepers lives, the
lease holds without renewals. Otherwise a lease that nobody renews runs out and the tree ends, so that nothing
is left behind. The lease is renewed only for the process that the record beside it names, because a keeper
could not find any other process.

With `--restart`, the host starts its command again when a signal has killed it. So a killed gateway comes
back although nobody is there to start its host, as while Ray restarts. The host ends with a command that ends
by itself, or that is killed within its first seconds.

With `--leave-s`, the first SIGTERM is a request to the keeper. The host creates a file that the keeper sees.
The keeper lets the engine's conversations move to other engines, and removes the lease. A second SIGTERM ends
the tree immediately.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvtransfer.parent_death import die_with_parent
from workers.oom_score import set_oom_score
from workers.processes import WorkerError, end, find, tree

log = logging.getLogger("conserve.workers.host")

SUPERVISOR = "CONSERVE_SUPERVISOR"  # environment variable with the supervisor's pid and start time
LOOK_EVERY_S = 0.25
SOUND_AFTER_S = 5.0  # a killed command is restarted if it ran for at least this long
PR_SET_CHILD_SUBREAPER = 36
ASKED_TO_END = "asked_to_end"  # file beside the lease that a first SIGTERM creates


class Lease:
    """Lease that expires `seconds` after its last renewal, or after a live supervisor was last seen.

    Time is monotonic, because the system's clock may jump.
    """

    def __init__(self, file: Path, seconds: float, record: Path, supervisor: str) -> None:
        """Take the lease. `supervisor` has the supervisor's pid and start time, or is empty without one."""
        self._file, self._seconds, self._record = file, seconds, record
        pid, _, started = supervisor.partition(" ")
        self._supervisor = (int(pid), float(started)) if supervisor else None
        self._seen = self._renewals()
        self._until = time.monotonic() + seconds

    def held(self) -> bool:
        renewals = self._renewals()
        if renewals is None:
            return False
        if (renewals != self._seen or self._supervised()) and self._recorded():
            self._seen = renewals
            self._until = time.monotonic() + self._seconds
        return time.monotonic() < self._until

    def _supervised(self) -> bool:
        return self._supervisor is not None and find(*self._supervisor) is not None

    def _recorded(self) -> bool:
        """Return whether the record names this process. An unreadable record counts as naming it."""
        try:
            return bool(json.loads(self._record.read_text())["pid"] == os.getpid())
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError, KeyError):
            return True

    def _renewals(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return None


class AskedToEnd(WorkerError):
    """Exception with which a signal makes this host end."""


@dataclass(slots=True)
class EndSignal:
    """Handler of SIGTERM: the first signal asks the keeper to let the engine end; the second ends it."""

    file: Path  # created by the first signal
    leave_s: float  # from the first signal to the end; 0: the first signal ends the host
    until: float = math.inf

    def __call__(self, _signal: int, _frame: object) -> None:
        if not self.leave_s or self.until < math.inf:
            raise AskedToEnd
        self.until = time.monotonic() + self.leave_s
        self.file.touch()

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until


def run(
    argv: list[str], lease: Lease, grace_s: float, oom_score: int, asked: EndSignal, restart: bool
) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans of the tree become children of this process, so that it finds and ends them too.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked.file.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, asked)
    signal.signal(signal.SIGINT, _raise)

    def prepare() -> None:
        die_with_parent()
        set_oom_score(oom_score)

    try:
        while True:
            started = time.monotonic()
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                preexec_fn=prepare,  # noqa: PLW1509, one thread
            )
            ends = os.pidfd_open(child.pid)
            while child.poll() is None:
                if not lease.held():
                    log.warning("lease_expired command=%r", argv[0])
                    return 3
                if asked.over:
                    return 0
                select.select([ends], [], [], LOOK_EVERY_S)
            os.close(ends)
            if child.returncode >= 0:
                return child.returncode
            if not restart or time.monotonic() < started + SOUND_AFTER_S:
                return 128 - child.returncode
            log.warning("restarts_killed_command signal=%d command=%r", -child.returncode, argv[0])
            end((one for one in tree(psutil.Process()) if one.pid != os.getpid()), grace_s)
    except AskedToEnd:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end((one for one in tree(psutil.Process()) if one.pid != os.getpid()), grace_s)


def _log_to_stderr() -> None:
    """Write log lines in the format of the commands that hosts run, because both write to one file."""
    logging.Formatter.converter = time.gmtime
    form = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s"
    logging.basicConfig(format=form, datefmt="%Y-%m-%dT%H:%M:%S")


def _raise(_signal: int, _frame: object) -> None:
    raise AskedToEnd


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.host", description=__doc__)
    parser.add_argument("--lease", type=Path, required=True, help="file that is touched to renew the lease")
    parser.add_argument("--lease-s", type=float, required=True, help="seconds that a renewal lasts")
    parser.add_argument("--record", type=Path, required=True, help="file that names the process of the lease")
    parser.add_argument("--oom-score", type=int, default=0, help="oom_score_adj of the command")
    parser.add_argument("--grace-s", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--leave-s", type=float, default=0.0, help="seconds from a first SIGTERM to the end")
    parser.add_argument("--restart", action="store_true", help="start a killed command again")
    parser.add_argument("argv", nargs=argparse.REMAINDER, help="-- and the command to run")
    arguments = parser.parse_args()
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not argv:
        parser.error("a command is needed after --")
    if os.getsid(0) != os.getpid():
        os.setsid()
    _log_to_stderr()
    supervisor = os.environ.get(SUPERVISOR, "")
    lease = Lease(arguments.lease, arguments.lease_s, arguments.record, supervisor)
    asked = EndSignal(arguments.lease.with_name(ASKED_TO_END), arguments.leave_s)
    return run(argv, lease, arguments.grace_s, arguments.oom_score, asked, restart=arguments.restart)


if __name__ == "__main__":
    sys.exit(main())
