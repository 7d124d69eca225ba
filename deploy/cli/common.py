"""Arguments and helpers that several commands use: to find a fleet, and to print errors as sentences."""

import errno
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import DeployError
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import serving
from deploy.lifecycle.up import is_up
from deploy.machine import folders
from kvtransfer import KVTransferError
from placement import PlacementError
from router.errors import RouterError
from traces import NotATrace, TraceError, importers
from traces.format import Trace, load
from workers.processes import WorkerError

EXPECTED = (DeployError, KVTransferError, PlacementError, RouterError, TraceError, WorkerError)
DENIED = (errno.EACCES, errno.EROFS, errno.ENOTDIR)
FULL = (errno.ENOSPC, errno.EDQUOT)
FleetFile = Annotated[Path, typer.Argument(help="A fleet file, as configs/laptop.yaml")]
_WHICH = "Name or file of the fleet; by default the only one that is up"
FleetName = Annotated[str | None, typer.Argument(metavar="[FLEET]", help=_WHICH)]
FleetOption = Annotated[str | None, typer.Option("--fleet", help=_WHICH)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print our own errors, and errors about files that cannot be written, as a sentence, and exit with 1.

    Other errors keep their traceback.
    """
    try:
        yield
    except EXPECTED as error:
        sentence = str(error)
        print(sentence if "\n" in sentence else f"conserve: {sentence}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in FULL and not (error.filename and error.errno in DENIED):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"conserve: {where}{error.strerror}{_elsewhere(error)}", file=sys.stderr)
        sys.exit(1)


def _elsewhere(error: OSError) -> str:
    """Return advice to choose other folders; empty if `error` is about a file outside ConServe's folders."""
    file = Path(str(error.filename)).resolve()
    ours = [folder.resolve() for _, folder in folders().values()]
    if error.filename and not any(file.is_relative_to(one) or one.is_relative_to(file) for one in ours):
        return ""
    return f"; {', '.join(folders())} name other folders"


def home_of(fleet: str | None) -> FleetHome:
    """Return the home of `fleet`, a name or a fleet file; with None, that of the only fleet that is up."""
    if fleet is None:
        return only_fleet()
    if fleet.endswith((".yaml", ".yml")):
        return FleetHome.of(load_fleet(Path(fleet)).name)
    return FleetHome.of(fleet)


def gateway_of(fleet: str | None) -> tuple[str, FleetSpec]:
    """Return the address of a fleet's gateway, and the fleet as it was brought up."""
    home = home_of(fleet)
    return serving(home).endpoint, load_fleet(home.fleet_file)


def only_fleet(*, to_end: bool = False) -> FleetHome:
    """Return the home of the only fleet that is up or, if none is up, of the only fleet that was killed.

    With `to_end`, fleets of both kinds count, so that a command without a name cannot end the wrong fleet.
    """
    runs = FleetHome.of_runs()
    up = [home for home in runs if is_up(home)]
    match runs if to_end else up or runs:
        case [one]:
            return one
        case []:
            start = "conserve serve MODEL, or conserve up FILE"
            raise DeployError(f"no fleet is up on this machine; start one with: {start}")
        case several:
            names = ", ".join(home.name for home in several)
            if len(up) < len(several):
                are = f"{len(up) or 'no'} fleet{'s are' if len(up) > 1 else ' is'} up"
                raise DeployError(f"{are}, and others were killed and not brought down: {names}; say which")
            raise DeployError(f"several fleets are up: {names}; say which")


def any_trace(path: Path) -> Trace:
    """Return the trace in file `path`, which has our format or one that an importer knows."""
    try:
        return load(path)
    except NotATrace:
        return importers.import_files([path])


class Progress:
    """Prints progress, each line with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", flush=True)
