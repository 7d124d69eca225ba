"""conserve journal repair: make a damaged journal of the directory usable again."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.common import FleetOption, home_of
from router.directory.journal import CONVERSATION, replace, salvage

app = typer.Typer(no_args_is_help=True)


@app.callback()
def journal() -> None:
    """Repair a damaged journal of the directory."""


@app.command("repair")
def repair(
    file: Annotated[Path | None, typer.Argument(help="The journal; by default that of --fleet")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Replace the journal by its intact rows")] = False,
    fleet: FleetOption = None,
) -> None:
    """Report which rows of a damaged journal are intact; with --yes, keep only those.

    The former files are kept beside the new one. The directory must not be running.
    """
    path = file if file is not None else home_of(fleet).journal
    rows, lost = salvage(path)
    conversations = sum(row.subject.startswith(CONVERSATION) and row.slot == "whole" for row in rows)
    print(f"{path}: {len(rows)} rows are intact, of {conversations} conversations; {lost} are damaged")
    print("transactions that SQLite dropped from the end of its log are missing, too")
    if not yes:
        print("nothing was changed; --yes replaces the journal by the intact rows")
        return
    kept = replace(path, rows, f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}")
    print(f"repaired; the former files are at {kept}*")
