"""Starts plain vLLM servers with the options of a fleet's engines, for comparison with the fleet."""

import json
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.processes import HOST, Subject
from deploy.fleet import FleetSpec
from deploy.fleet.components import engine_spec, engines
from deploy.home import FleetHome
from placement.engines import Role
from workers.keeper.launch import SERVER, EngineKeys, Start, engine_command
from workers.processes import free_port

VLLM_SERVER = "vllm.entrypoints.openai.api_server"
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


class DoesNotRun(Exception):
    """The server that a benchmark wants to measure is not installed or does not start."""


@dataclass(frozen=True)
class Bench:
    """Fleet file, work folder and folder of installed peers, for all servers that one run measures."""

    fleet: FleetSpec
    work: Path
    peers: Path | None
    start_limit_s: float

    @property
    def replicas(self) -> int:
        return sum(tier.replicas for tier in self.fleet.tiers)

    def path(self, *parts: str) -> Path:
        """Return a path below the folder of installed peers; raise `DoesNotRun` if it does not exist."""
        found = self.peers.joinpath(*parts) if self.peers else None
        if found is None or not found.exists():
            raise DoesNotRun(f"not installed: no {'/'.join(parts)} under --peers")
        return found

    def ready(self, subject: Subject) -> str:
        """Start a server and return its URL; raise `DoesNotRun` if it does not become ready."""
        log = self.work / f"{subject.name}.log"
        subject.start(log, os.sched_getaffinity(0))
        if not subject.wait_until_ready():
            subject.stop()
            end = log.read_text(errors="replace")[-400:]
            raise DoesNotRun(f"did not serve within {subject.start_limit_s:.0f} s; its log ends: {end}")
        return subject.url


class PlainEngines(AbstractContextManager["PlainEngines"]):
    """Plain vLLM servers, as many as the fleet has engines. They start when they are first used."""

    def __init__(self, bench: Bench, nixl_environment: dict[str, str] | None = None) -> None:
        """Prepare the servers. With `nixl_environment`, they move KV with vLLM's NixlConnector."""
        self._bench = bench
        self._nixl_environment = nixl_environment
        self._engines: list[Subject] = []

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.stop()
        self._engines.clear()

    def urls(self) -> list[str]:
        if not self._engines:
            self._engines = [self._engine(number) for number in range(self._bench.replicas)]
            began = time.monotonic()
            for engine in self._engines:
                engine.start(self._bench.work / f"{engine.name}.log", os.sched_getaffinity(0))
            for engine in self._engines:
                engine.start_limit_s = max(1.0, began + self._bench.start_limit_s - time.monotonic())
                if not engine.wait_until_ready():
                    self.__exit__()
                    end = (self._bench.work / f"{engine.name}.log").read_text(errors="replace")[-400:]
                    raise DoesNotRun(f"plain vLLM does not start; its log ends: {end}")
        return [engine.url for engine in self._engines]

    def _engine(self, number: int) -> Subject:
        bench, port = self._bench, free_port(HOST)
        decoder = next(engine for engine in engines(bench.fleet) if engine.tier.role is not Role.PREFILL)
        spec = engine_spec(bench.fleet, decoder, FleetHome(bench.work / "home"), HOST)
        spec = replace(spec, connector=None, scheduler_class=None, worker_class=None, additional=None)
        command = engine_command(spec, Start(1, port, 0), EngineKeys(), os.environ)
        argv, environment = [*command.argv], dict(command.env)
        argv[argv.index(SERVER)] = VLLM_SERVER
        while "--middleware" in argv:
            at = argv.index("--middleware")
            del argv[at : at + 2]
        name = f"plain-{number}"
        if self._nixl_environment is not None:
            name = f"plain-nixl-{number}"
            argv += ["--kv-transfer-config", json.dumps(NIXL)]
            environment |= self._nixl_environment
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(HOST))
        return Subject(name, argv, port, environment)
