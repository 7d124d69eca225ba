"""conserve power plan|apply|restore: show, set and reset power limits of this machine's GPUs."""

import os
import socket
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.common import FleetFile
from deploy.errors import DeployError
from deploy.fleet import FleetSpec, load_fleet
from deploy.fleet.engine_arguments import engine_resources
from deploy.home import POWER, conserve_home
from workers.power import limits
from workers.power.limits import LimitChange, WantedLimit, boot_id
from workers.power.nvml import Gpus

app = typer.Typer(no_args_is_help=True, help="Power limits of this machine's GPUs: plan, apply, restore.")
console = Console()

Tier = Annotated[str | None, typer.Option(help="Only this tier runs here, on all GPUs")]


@app.command("plan")
def plan(file: FleetFile, tier: Tier = None) -> None:
    """Show how GPU power limits would change, without changing them."""
    with Gpus() as gpus:
        _show(_planned(gpus, load_fleet(file), tier))


@app.command("apply")
def apply(
    file: FleetFile,
    tier: Tier = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Make the changes; without it they are only shown")
    ] = False,
) -> None:
    """Set power limits, which stay until `conserve power restore`. Keepers reset only their own limits."""
    with Gpus() as gpus:
        fleet = load_fleet(file)
        changes = _planned(gpus, fleet, tier)
        _show(changes)
        if not yes:
            console.print("Nothing was changed; --yes makes the changes")
            return
        wishes = [change.wish for change in changes]
        holder = f"{socket.gethostname()}:{os.getpid()}"
        _tell(limits.apply(gpus, wishes, conserve_home() / POWER, boot_id(), holder))


@app.command("restore")
def restore() -> None:
    """Reset each power limit of this machine that ConServe has changed."""
    with Gpus() as gpus:
        outcomes = limits.restore(gpus, conserve_home() / POWER, boot_id())
        if not outcomes:
            console.print("Nothing to reset.")
        _tell(outcomes)


def _planned(gpus: Gpus, fleet: FleetSpec, tier: str | None) -> list[LimitChange]:
    wishes = wishes_of(fleet, len(gpus.all()), tier)
    if not wishes:
        raise DeployError(f"no tier of fleet '{fleet.name}' that runs here has a power_cap_w")
    return limits.plan(gpus, wishes, limits.read_record(conserve_home() / POWER, boot_id()))


def wishes_of(fleet: FleetSpec, gpus: int, tier: str | None) -> list[WantedLimit]:
    """Return the power limits of this machine's `gpus` GPUs, which the tiers of `fleet` take in their order.

    With `tier`, that tier takes all GPUs.
    """
    names = [known.name for known in fleet.tiers]
    if tier is not None:
        if tier not in names:
            raise DeployError(f"fleet '{fleet.name}' has no tier '{tier}'; it has {', '.join(names)}")
        cap = fleet.tiers[names.index(tier)].power_cap_w
        return [WantedLimit(str(at), cap, tier) for at in range(gpus)] if cap is not None else []
    wishes, at = [], 0
    for known in fleet.tiers:
        each = int(engine_resources(fleet, known).get("GPU", 0))
        for index in range(known.replicas):
            if known.power_cap_w is not None:
                engine = f"{known.name}-{index}"
                wishes += [WantedLimit(str(at + gpu), known.power_cap_w, engine) for gpu in range(each)]
            at += each
    return wishes


def _show(changes: Sequence[LimitChange]) -> None:
    table = Table("GPU", "for", "now", "cap", "takes", "")
    for change in changes:
        gpu, wish = change.gpu, change.wish
        note = change.problem or ("" if change.needed else "already set")
        if gpu is None:
            table.add_row(wish.gpu, wish.owner, "", f"{wish.cap_w:g} W", "", note)
            continue
        takes = f"{gpu.least_w:g} to {gpu.most_w:g} W" if gpu.takes_limits else "none"
        row = (
            gpu.label,
            wish.owner,
            f"{gpu.limit_w:g} W" if gpu.takes_limits else "",
            f"{wish.cap_w:g} W",
            takes,
            note,
        )
        table.add_row(*row)
    console.print(table)


def _tell(outcomes: Sequence[limits.Outcome]) -> None:
    for outcome in outcomes:
        console.print(f"GPU {outcome.gpu}, {outcome.owner}: {outcome.text}", markup=False)
    failed = sum(not outcome.done for outcome in outcomes)
    if failed:
        raise DeployError(f"{failed} of {len(outcomes)} limits were not set")
