"""Which fleet is meant: by its name, or by the file it was brought up from."""

from pathlib import Path

from deploy.fleet import load_fleet
from deploy.home import FleetHome


def home_of(fleet: str) -> FleetHome:
    if fleet.endswith((".yaml", ".yml")):
        return FleetHome.of(load_fleet(Path(fleet)).name)
    return FleetHome.of(fleet)
