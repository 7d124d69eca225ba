"""conserve logs ENGINE: the end of an engine's log."""

from typing import Annotated

import typer

from deploy.cli.names import home_of
from deploy.lifecycle.errors import LifecycleError
from workers.log_tail import last_lines


def register(app: typer.Typer) -> None:
    app.command()(logs)


def logs(
    engine: Annotated[str, typer.Argument(help="an engine or a gateway, as decode-0 or gateway-0")],
    fleet: Annotated[str, typer.Option(help="the fleet's name or file")] = "laptop",
    lines: Annotated[int, typer.Option(help="how many")] = 50,
) -> None:
    """Print the end of an engine's or a gateway's log."""
    home = home_of(fleet)
    known = sorted(path for path in (*home.engines.glob("*"), *home.gateways.glob("*")) if path.is_dir())
    for directory in known:
        if directory.name == engine:
            print("\n".join(last_lines(directory / "log", lines)))
            return
    names = ", ".join(path.name for path in known) or "none: was the fleet ever up?"
    raise LifecycleError(f"no engine '{engine}' in fleet '{home.root.name}'; there are: {names}")
