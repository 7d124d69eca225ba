"""Names of gateway processes: which of two with one name is the newer.

A gateway's name is its place in the fleet, and one process at a time has it. What an earlier process of the
name was doing ended with it.
"""

import time


def begin(name: str) -> str:
    """This process, from now on."""
    return f"{name}.{time.time_ns():016x}"


def supersedes(newer: str, older: str) -> bool:
    name, _, number = newer.rpartition(".")
    earlier_name, _, earlier = older.rpartition(".")
    return name == earlier_name and earlier < number
