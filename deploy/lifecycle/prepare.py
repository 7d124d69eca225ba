"""What a fleet needs on this machine before anything starts."""

import socket
from collections.abc import Mapping
from pathlib import Path

import yaml

from deploy.fleet import Fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import bring_down
from deploy.lifecycle.errors import LifecycleError
from deploy.model.ensure import ensure_model
from workers import process_tree


def prepare(fleet: Fleet, home: FleetHome) -> None:
    refuse_missing_model(fleet)
    if home.read_run() is not None:
        bring_down(home)  # what a run left that was killed
    refuse_taken_port(fleet)
    home.create()
    home.secret()
    write_fleet(fleet, home)
    ensure_model(fleet, home)


def write_fleet(fleet: Fleet, home: FleetHome) -> None:
    """As it was brought up."""
    draft: Path = home.fleet_file.with_suffix(".draft")
    draft.write_text(yaml.safe_dump(fleet.model_dump(mode="json", exclude_unset=True), sort_keys=False))
    draft.replace(home.fleet_file)


def is_up(home: FleetHome) -> bool:
    """Or may be: on a Ray cluster that is not ours only Ray itself could say."""
    run = home.read_run()
    return run is not None and (run.pid == 0 or process_tree.find(run.pid, run.started) is not None)


def refuse_taken_port(fleet: Fleet) -> None:
    gateway = fleet.gateway
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((gateway.host, gateway.port))
        except OSError as error:
            where = f"{gateway.host}:{gateway.port} ({error.strerror})"
            raise LifecycleError(
                f"the gateway cannot listen on {where}; change gateway.port or end what is there"
            ) from error


def refuse_missing_model(fleet: Fleet) -> None:
    """A directory that is not there; on other machines, and in the hub, only engines can look."""
    path = fleet.model.path
    is_path = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    if fleet.ray.address is None and is_path and not (Path(path).expanduser() / "config.json").is_file():
        raise LifecycleError(
            f"model.path: there is no model in {Path(path).expanduser().absolute()}; it must be a directory "
            "with config.json, a Hugging Face id as in Qwen/Qwen3-0.6B, or `small`"
        )


def refuse_what_does_not_fit(fleet: Fleet, there: Mapping[str, float]) -> None:
    """On a cluster of our own, which does not grow; other clusters may be waited for."""
    if fleet.ray.address is not None:
        return
    for name in sorted({name for tier in fleet.tiers for name in tier.resources}):
        takers = [tier for tier in fleet.tiers if tier.replicas and name in tier.resources]
        wanted = sum(tier.resources[name] * tier.replicas for tier in takers)
        if wanted > there.get(name, 0):
            tiers = " and ".join(f"{tier.replicas} x {tier.name}" for tier in takers)
            raise LifecycleError(
                f"{tiers} take {wanted:g} {name}, and this machine has {there.get(name, 0):g}: lower "
                "replicas or resources of these tiers, or name a larger Ray cluster in ray.address"
            )
