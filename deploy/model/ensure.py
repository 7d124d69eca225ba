"""The small model in a fleet's directory, where the fleet asks for it."""

import fcntl
import logging

from deploy.fleet import Fleet
from deploy.fleet.schema import SMALL_MODEL
from deploy.home import FleetHome
from deploy.model.make import make_model


def ensure_model(fleet: Fleet, home: FleetHome) -> None:
    """Make the small model on this node; several keepers do so at the same time, one of them in fact."""
    if fleet.model.path != SMALL_MODEL:
        return
    with (home.root / "model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if make_model(home.model):
            logging.getLogger("conserve.deploy.model").info("small model made in %s", home.model)
