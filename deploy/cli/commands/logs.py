"""conserve logs: print the end of a process's log."""

from typing import Annotated

import typer

from deploy.cli.common import FleetOption, home_of
from deploy.errors import DeployError
from workers.keeper.engine_log import last_lines


def logs(
    engine: Annotated[str, typer.Argument(help="An engine, a gateway (gateway-0), `batch` or `directory`")],
    fleet: FleetOption = None,
    lines: Annotated[int, typer.Option(help="Number of lines")] = 50,
) -> None:
    """Print the end of the log of an engine, a gateway, the batch process or the directory."""
    home = home_of(fleet)
    folders = (*home.engines.glob("*"), *home.gateways.glob("*"), home.directory)
    known = sorted(path for path in folders if path.is_dir())
    for directory in known:
        if directory.name == engine:
            print("\n".join(last_lines(directory / "log", lines)))
            return
    names = ", ".join(path.name for path in known) or "none: was the fleet ever up?"
    raise DeployError(f"no engine '{engine}' in fleet '{home.name}'; there are: {names}")
