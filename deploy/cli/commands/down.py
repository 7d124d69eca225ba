"""conserve down [FLEET]: end a fleet."""

from typing import Annotated

import typer

from deploy.cli.names import home_of
from deploy.lifecycle.down import bring_down


def register(app: typer.Typer) -> None:
    app.command()(down)


def down(fleet: Annotated[str, typer.Argument(help="its name or file")] = "laptop") -> None:
    """End a fleet: every process of it on this machine."""
    home = home_of(fleet)
    ended = bring_down(home)
    if ended:
        print(f"{home.root.name}: {ended} processes ended")
        return
    others = sorted(path.parent.name for path in home.root.parent.glob("*/run.json"))
    print(f"{home.root.name}: nothing was up" + (f"; up may be: {', '.join(others)}" if others else ""))
