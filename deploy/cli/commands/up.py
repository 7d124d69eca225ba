"""conserve up: start a fleet, or change a running one."""

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.common import FleetFile, Progress
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import bring_down
from deploy.lifecycle.endpoint import curl
from deploy.lifecycle.up import bring_up, is_up
from deploy.lifecycle.upgrade import upgrading

POLL_S = 1.0


def up(
    file: FleetFile,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the fleet serves")] = False,
    port: Annotated[int | None, typer.Option(help="Overrides gateway.port", min=1, max=65535)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="On a running fleet: only show what would change")
    ] = False,
) -> None:
    """Start a fleet and serve until Ctrl-C. If the fleet is up, change what differs while it serves."""
    fleet = load_fleet(file, to_start=True)
    if port is not None:
        fleet = fleet.model_copy(update={"gateway": fleet.gateway.model_copy(update={"port": port})})
    start_or_change(fleet, file, detach=detach, dry_run=dry_run)


def start_or_change(fleet: FleetSpec, file: Path, *, detach: bool, dry_run: bool) -> None:
    home = FleetHome.of(fleet.name)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if is_up(home):
        change(fleet, home, dry_run)
    elif dry_run:
        print(f"fleet '{fleet.name}' is not up: everything in {file} would be started")
    else:
        start(fleet, home, detach)


def start(fleet: FleetSpec, home: FleetHome, detach: bool) -> None:
    progress = Progress()
    try:
        endpoint = bring_up(fleet, home, progress.tell, end_with_us=not detach)
    except KeyboardInterrupt:
        progress.tell("interrupted: everything is down again")
        raise typer.Exit(130) from None
    progress.tell(f"serving on {endpoint}")
    print(f"\n{curl_line(fleet)}\n\nDashboard: {endpoint}/dashboard{dashboard_key(fleet)}", flush=True)
    if detach:
        print(f"The fleet runs without this terminal. To end it: conserve down {fleet.name}", flush=True)
        return
    print("Ctrl-C ends it.", flush=True)
    try:
        wait_for_end(home)
        progress.tell("the fleet was ended from elsewhere")
    except KeyboardInterrupt:
        progress.tell("ending")
        bring_down(home)
        progress.tell("everything is down")


def wait_for_end(home: FleetHome, poll_s: float = POLL_S) -> None:
    """Wait until the fleet's present run has ended, even if another run has begun by then."""
    ours = home.read_run()
    while ours is not None and ours.same_run(home.read_run()):
        time.sleep(poll_s)


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
            progress.tell("interrupted: the fleet serves, partly changed; the same command continues")
            raise typer.Exit(130) from None
        progress.tell(f"serving on {upgrade.endpoint}, as the file says")


def dashboard_key(fleet: FleetSpec) -> str:
    """Return how to make a key of scope admin, which the dashboard asks for; empty without a keys file."""
    if not fleet.gateway.keys_file:
        return ""
    command = f"conserve key new --owner NAME --scope admin --fleet {fleet.name}"
    return f" (asks for a key of scope admin, as the password: {command})"


def curl_line(fleet: FleetSpec) -> str:
    """Return a `curl` command that asks the fleet a question."""
    asks_for_key = fleet.gateway.api_keys or fleet.gateway.keys_file
    key = ' -H "Authorization: Bearer $CONSERVE_API_KEY"' if asks_for_key else ""
    body = (
        f'{{"model": "{fleet.model.name}", "max_tokens": 32, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return f"{curl(fleet)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
