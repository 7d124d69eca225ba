"""The fleet file: its schema, its loader, and what each room gets from it."""

from deploy.fleet.load import load_fleet, parse_fleet
from deploy.fleet.problems import FleetFileError
from deploy.fleet.schema import Fleet, Tier

__all__ = ["Fleet", "FleetFileError", "Tier", "load_fleet", "parse_fleet"]
