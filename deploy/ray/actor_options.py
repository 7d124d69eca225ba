"""How Ray is to run an actor of ours: detached, restarted for ever, on the resources of its kind."""

import os
from typing import Any

from deploy.fleet import Fleet
from deploy.ray.own_cluster import CONTROL

# Engines and gateways outlive the actor that started them, also when Ray is told to end it.
_CHILDREN_OUTLIVE = {"RAY_kill_child_processes_on_worker_exit": "false"}


def always(name: str) -> dict[str, Any]:
    """Detached: it stays when the process that made it ends."""
    return {
        "name": name,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_task_retries": 0,
        "get_if_exists": True,
        "runtime_env": {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], **_CHILDREN_OUTLIVE}},
    }


def resources(wanted: dict[str, float]) -> dict[str, Any]:
    """Ray takes CPUs and GPUs apart from custom resources. An actor of ours takes no CPU unless told."""
    custom = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": wanted.get("CPU", 0), "num_gpus": wanted.get("GPU", 0), "resources": custom}


def control(fleet: Fleet) -> dict[str, Any]:
    """For what is not an engine."""
    wanted = fleet.ray.control_resources
    return resources({**wanted, CONTROL: 1.0} if fleet.ray.address is None else wanted)
