"""The fleet file: its schema, its loader, and the configurations made from it."""

from deploy.fleet.load import FleetFileError, load_fleet, parse_fleet
from deploy.fleet.schema import FleetSpec, TierSpec

__all__ = ["FleetFileError", "FleetSpec", "TierSpec", "load_fleet", "parse_fleet"]
