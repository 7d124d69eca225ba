"""Helpers of our Ray actors: names, options, encrypted arguments, logs and background work."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import start_http_server

from deploy.fleet import FleetSpec
from deploy.fleet.components import EngineName
from deploy.home import FleetKeys
from deploy.ray.cluster import CONTROL
from router import process

log = logging.getLogger("conserve.deploy.actor")

DIRECTORY = "directory"
GATEWAYS = "gateways"
AUTOSCALER = "autoscaler"
_KEEPER = "keeper:"

# Engines and gateways outlive the actor that started them, also when Ray is told to end it.
_CHILDREN_OUTLIVE = {"RAY_kill_child_processes_on_worker_exit": "false"}

Result = TypeVar("Result")


def keeper_name(engine: str) -> str:
    return f"{_KEEPER}{engine}"


def engines_of(actors: list[str]) -> list[str]:
    """Return the names of the engines whose keepers are among `actors`, in the order of tier and index."""
    names = [actor.removeprefix(_KEEPER) for actor in actors if actor.startswith(_KEEPER)]
    return sorted(names, key=replica)


def replica(engine: str) -> tuple[str, int]:
    """Return the tier and index of an engine: (`decode`, 10) for `decode-10`."""
    tier, _, index = engine.rpartition("-")
    return tier, int(index)


def always(name: str) -> dict[str, Any]:
    """Return the Ray options of a detached actor, which outlives the process that created it."""
    return {
        "name": name,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": 0,
        "get_if_exists": True,
        "runtime_env": {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], **_CHILDREN_OUTLIVE}},
    }


def resources(wanted: dict[str, float]) -> dict[str, Any]:
    """Return the wanted resources as Ray's options for an actor, with no CPU unless `wanted` has one."""
    custom = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": wanted.get("CPU", 0), "num_gpus": wanted.get("GPU", 0), "resources": custom}


def control_resources(fleet: FleetSpec) -> dict[str, Any]:
    """Return the Ray options of actors other than keepers."""
    wanted = fleet.ray.control_resources
    return resources({**wanted, CONTROL: 1.0} if fleet.ray.address is None else wanted)


def log_to_stderr() -> None:
    process.log_to_stderr()
    logging.getLogger("ray").setLevel(logging.WARNING)


def serve_metrics(host: str) -> str:
    """Serve metrics on a free port until the process ends; return host:port."""
    server, _ = start_http_server(0, addr=host)
    return f"{host}:{server.server_port}"


class Background:
    """Runs an actor's work in an event loop in a thread. If it fails, the process ends; Ray restarts it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._began = threading.Event()
        threading.Thread(target=self._run, name="background", daemon=True).start()
        self._began.wait()

    def call(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def stop(self) -> None:
        """Cancel the work and wait for its end. Run this coroutine in the thread's loop, through `call`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(_end_process_on_failure)
        self._began.set()
        self._loop.run_forever()


def _end_process_on_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the actor's work failed", exc_info=error)
        os._exit(70)


@dataclass(frozen=True, slots=True)
class SealedFleet:
    """Encrypted fleet, as an argument of actors: Ray stores arguments, and a fleet can hold passwords."""

    content: bytes

    @classmethod
    def of(cls, fleet: FleetSpec, keys: FleetKeys) -> "SealedFleet":
        return cls(keys.seal(fleet.model_dump_json(exclude_unset=True).encode()))

    def opened(self, keys: FleetKeys) -> FleetSpec:
        return FleetSpec.model_validate_json(keys.unseal(self.content))


def engine_named(fleet: FleetSpec, name: str) -> EngineName:
    return EngineName(name, next(tier for tier in fleet.tiers if tier.name == replica(name)[0]))
