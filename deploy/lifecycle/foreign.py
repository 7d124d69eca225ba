"""End a fleet's actors in a Ray cluster that is not ours: its other work goes on."""

import contextlib
from typing import Any

from deploy.fleet import load_fleet
from deploy.home import FleetHome, RunRecord

END_LIMIT_S = 60.0
ANSWER_LIMIT_S = 5.0


def end_actors(home: FleetHome, run: RunRecord) -> None:
    from deploy.lifecycle.cluster import connect
    from deploy.ray.names import AUTOSCALER, DIRECTORY, GATEWAYS, engines_of, keeper_name

    fleet = load_fleet(home.fleet_file)
    ray = connect(fleet, home, run)
    try:
        handles = {}
        keepers = map(keeper_name, engines_of(ray.util.list_named_actors()))
        for name in (AUTOSCALER, GATEWAYS, *keepers, DIRECTORY):
            with contextlib.suppress(ValueError):  # there is none of that name
                handles[name] = ray.get_actor(name)
        with contextlib.suppress(KeyError):
            ray.kill(handles.pop(AUTOSCALER), no_restart=True)  # it would start others
        there = _answering(ray, {name: one for name, one in handles.items() if name != DIRECTORY})
        ending = [handle.end.remote() for handle in there]
        if ending:  # what does not end is killed next, and its engine ends by its lease
            ray.wait(ending, num_returns=len(ending), timeout=END_LIMIT_S)
        for handle in handles.values():
            ray.kill(handle, no_restart=True)
    finally:
        ray.shutdown()


def _answering(ray: Any, handles: dict[str, Any]) -> list[Any]:
    """Without those whose node is lost: they would answer when another comes."""
    asked = {handle.__ray_ready__.remote(): handle for handle in handles.values()}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_LIMIT_S) if asked else ([], [])
    return [asked[one] for one in ready]
