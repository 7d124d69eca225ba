"""Plain vLLM with the fleet's model, options and server, without our connector and scheduler."""

import os
import signal
import subprocess
import time
import urllib.request
from dataclasses import replace
from types import TracebackType

from deploy.fleet.components import engine_spec, engines
from tests.support.fleet import RunningFleet
from workers.keeper.launch import EngineKeys, Start, engine_command
from workers.processes import free_port

START_LIMIT_S = 600


class PlainEngine:
    """Runs vLLM as a fleet's decoder does, without our connector, scheduler and worker."""

    def __init__(self, fleet: RunningFleet) -> None:
        decoder = next(engine for engine in engines(fleet.fleet) if engine.tier.role == "decode")
        plain = {"connector": None, "scheduler_class": None, "worker_class": None, "additional": None}
        spec = replace(engine_spec(fleet.fleet, decoder, fleet.home, "127.0.0.1"), **plain)
        self._port = free_port("127.0.0.1")
        self._command = engine_command(spec, Start(1, self._port, 0), EngineKeys(), os.environ)
        self._log = fleet.base / "plain-engine.log"
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "PlainEngine":
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command.argv, env=self._command.env, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"plain vLLM does not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.5)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # the group includes its children
        self._process.wait(30)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False
