"""conserve down: end a fleet."""

from deploy.cli.common import FleetName, home_of, only_fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import bring_down


def down(fleet: FleetName = None) -> None:
    """End a fleet: all of its processes on this machine."""
    home = home_of(fleet) if fleet is not None else only_fleet(to_end=True)
    ended = bring_down(home)
    others = ", ".join(other.name for other in FleetHome.of_runs())
    if ended:
        print(f"{home.name}: {ended} processes ended")
    else:
        print(f"{home.name}: nothing was up" + (f"; up may be: {others}" if others else ""))
