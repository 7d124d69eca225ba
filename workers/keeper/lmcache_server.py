"""LMCache server of a node: the first keeper starts it, and every keeper renews its lease."""

import asyncio
import fcntl
import hashlib
import logging
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from workers.host import SUPERVISOR
from workers.keeper import metrics
from workers.keeper.launch import FLEET_MARK, ProcessCommand
from workers.keeper.process_lease import RECORD, LeasedProcess, ProcessRecord
from workers.oom_score import OomScore
from workers.processes import free_port

log = logging.getLogger("conserve.workers.lmcache")

HOST = "127.0.0.1"
LEASE_S = 120.0  # keepers end with Ray on their node, and a busy machine restarts both within a minute
GRACE_S = 3.0
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class LmcacheServer:
    """LMCache server of a node, as one of the node's keepers sees it."""

    directory: Path  # shared by the keepers of the node
    gib: float
    chunk_tokens: int
    mark: str  # value of `FLEET_MARK` in the server's environment

    @property
    def _fingerprint(self) -> str:
        text = f"{self.gib} {self.chunk_tokens} {self.mark}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    async def keep(self) -> None:
        """Keep the server running until cancelled. The server ends when no keeper renews its lease."""
        while True:
            try:
                await asyncio.to_thread(self.ensure)
            except OSError as error:
                log.warning("LMCache cannot be started: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def address(self, limit_s: float) -> str:
        """Return the server's host:port once it answers, empty if it does not answer within `limit_s`."""
        clock = asyncio.get_running_loop().time
        end = clock() + limit_s
        while clock() < end:
            record = ProcessRecord.read(self.directory / RECORD)
            if record is not None and await asyncio.to_thread(_answers, record.ports[1]):
                return f"{HOST}:{record.ports[0]}"
            await asyncio.sleep(0.3)
        return ""

    def ensure(self) -> None:
        """Start the server unless it is running, and renew its lease."""
        with self._alone():
            before = ProcessRecord.read(self.directory / RECORD)
            process = LeasedProcess.adopt(self.directory, self._fingerprint, GRACE_S)
            if process is not None:
                return  # adopting renews its lease
            _shared_memory(self._fingerprint).unlink(missing_ok=True)  # left by a killed server
            # Reuse the ports, so that engines find the restarted server.
            known = before is not None and before.fingerprint == self._fingerprint
            ports = before.ports if before is not None and known else (free_port(HOST), free_port(HOST))
            process = LeasedProcess.start(
                self.directory,
                self.command(*ports),
                fingerprint=self._fingerprint,
                epoch=0,
                ports=ports,
                lease_s=LEASE_S,
                grace_s=GRACE_S,
                oom_score=OomScore.ENGINE,
            )
            metrics.TIER_STARTS.inc()
            log.info("LMCache started, pid %d, port %d", process.record.pid, ports[0])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def command(self, port: int, http_port: int) -> ProcessCommand:
        """Return the command of LMCache's server. Engines use `port`, and health checks use `http_port`."""
        argv = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server"]
        argv += ["--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(http_port)]
        argv += ["--l1-size-gb", str(self.gib), "--eviction-policy", "LRU"]
        argv += ["--chunk-size", str(self.chunk_tokens), "--supported-transfer-mode", "engine_driven"]
        argv += ["--shm-name", _shm_name(self._fingerprint), "--disable-observability"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env.pop(SUPERVISOR, None)  # the server lives by the keepers' lease alone
        env |= {FLEET_MARK: self.mark, "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
        return ProcessCommand(tuple(argv), env)


def _shared_memory(name: str) -> Path:
    """Return the file of the shared memory that LMCache 0.5.6 creates for `--shm-name`."""
    return Path("/dev/shm") / f"lmcache_l1_pool_{_shm_name(name)}"


def _shm_name(fingerprint: str) -> str:
    return f"conserve-{fingerprint}"


def _answers(http_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{http_port}/healthcheck", timeout=1):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
