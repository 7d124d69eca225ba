"""conserve check FILE: is this fleet file valid?"""

from pathlib import Path
from typing import Annotated

import typer

from deploy.fleet import load_fleet


def register(app: typer.Typer) -> None:
    app.command()(check)


def check(file: Annotated[Path, typer.Argument(help="a fleet file")]) -> None:
    """Say whether a fleet file is valid, and where it is not."""
    fleet = load_fleet(file)
    tiers = ", ".join(f"{tier.replicas} x {tier.name} ({tier.role})" for tier in fleet.tiers)
    print(f"{file}: valid: fleet '{fleet.name}', model {fleet.model.name}, {tiers}")
