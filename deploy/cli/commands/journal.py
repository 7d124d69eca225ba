"""conserve journal repair: what is left of a damaged journal of the directory."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.common import FleetOption, home_of
from router.directory.repair import replace, salvage

app = typer.Typer(no_args_is_help=True, help="The directory's journal: repair one that is damaged.")

_SHOWN = 20


@app.callback()
def journal() -> None:
    """One command, by its name."""


@app.command("repair")
def repair(
    file: Annotated[Path | None, typer.Argument(help="the journal; else that of --fleet")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="put what is left in its place")] = False,
    fleet: FleetOption = None,
) -> None:
    """Say what of a damaged journal can be read and what is lost; with --yes, put the former in its place.

    The files are kept as they were, beside it. No directory may use the journal.
    """
    path = file if file is not None else home_of(fleet).journal
    left = salvage(path)
    kinds = Counter(row.subject.partition(":")[0] for row in left.rows if row.slot == "whole")
    print(f"{path}: {len(left.rows)} rows are what was written, of {kinds['c']} conversations")
    print(f"lost: {len(left.lost)} rows")
    for one, times in list(Counter(left.lost).items())[:_SHOWN]:
        print(f"  {one}" + (f" ({times} times)" if times > 1 else ""))
    if len(set(left.lost)) > _SHOWN:
        print(f"  and {len(set(left.lost)) - _SHOWN} others")
    if not yes:
        print("nothing was changed; --yes puts what is left in its place")
        return
    kept = replace(path, left, f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}")
    print(f"repaired; the former files are at {kept}*")
