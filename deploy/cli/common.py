"""What commands share: which fleet is meant, progress, and errors as sentences."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import DeployError
from deploy.fleet import load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.up import is_up
from kvtransfer import KVTransferError
from placement import PlacementError
from router.errors import RouterError
from traces import NotATrace, TraceError, importers
from traces.format import Trace, load
from workers.processes import WorkerError

EXPECTED = (DeployError, KVTransferError, PlacementError, RouterError, TraceError, WorkerError)


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Where errors of ours end: a sentence on standard error and an exit code, not a traceback."""
    try:
        yield
    except EXPECTED as error:
        said = str(error)
        print(f"conserve: {said}" if "\n" not in said else said, file=sys.stderr)
        sys.exit(1)


FleetName = Annotated[
    str | None, typer.Argument(metavar="[FLEET]", help="Its name or file; else the only one that is up")
]
FleetOption = Annotated[str | None, typer.Option("--fleet", help="Its name or file; else the only one up")]


def home_of(fleet: str | None) -> FleetHome:
    """Of a fleet's name, or of the file it was brought up from, or of the only one that is up."""
    if fleet is None:
        return only_fleet()
    if fleet.endswith((".yaml", ".yml")):
        return FleetHome.of(load_fleet(Path(fleet)).name)
    return FleetHome.of(fleet)


def only_fleet(*, to_end: bool = False) -> FleetHome:
    """Or the only one that was killed and not brought down, where none is up. `to_end`: whoever says no name
    may mean what was killed, and must not end what serves: it has to be the only one of both."""
    runs = FleetHome.of_runs()
    up = [home for home in runs if is_up(home)]
    match runs if to_end else up or runs:
        case [one]:
            return one
        case []:
            raise DeployError("no fleet is up on this machine; start one with: conserve up FILE")
        case several:
            names = ", ".join(home.name for home in several)
            if len(up) < len(several):
                are = f"{len(up) or 'no'} fleet{'s are' if len(up) > 1 else ' is'} up"
                raise DeployError(f"{are}, and others were killed and not brought down: {names}; say which")
            raise DeployError(f"several fleets are up: {names}; say which")


def any_trace(path: Path) -> Trace:
    """In our format, or else whatever an importer knows."""
    try:
        return load(path)
    except NotATrace:
        return importers.import_files([path])


class Progress:
    """Lines for a person who waits, each with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", flush=True)
