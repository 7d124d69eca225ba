"""conserve status [FLEET]: what a fleet is doing."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.names import home_of
from deploy.lifecycle.status import FleetStatus, fleet_status


def register(app: typer.Typer) -> None:
    app.command()(status)


def status(
    fleet: Annotated[str, typer.Argument(help="its name or file")] = "laptop",
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show a fleet's engines: what they do, and the KV they hold."""
    found = fleet_status(home_of(fleet))
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
        return
    Console().print(_table(found))
    if not found.reachable:
        print("The directory does not answer: gateways serve the conversations they know, and no new ones.")


def _table(found: FleetStatus) -> Table:
    table = Table(title=f"{found.fleet}  {found.endpoint}", title_justify="left", box=None, pad_edge=False)
    for column in ("engine", "role", "pid", "KV", "parked", "runs", "conversations", "starts", "state"):
        left = column in ("engine", "role", "state")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "state")
    for engine in found.engines:
        state = "draining" if engine.draining else engine.phase
        detail = engine.failure or engine.detail
        used = f"{engine.live_tokens / engine.kv_tokens:.0%}" if engine.kv_tokens else ""
        table.add_row(
            *(engine.engine, engine.role, str(engine.pid or ""), used, str(engine.parked_tokens)),
            *(str(engine.running), str(engine.conversations), str(engine.restarts + 1)),
            f"{state}: {detail}" if detail else state,
        )
    return table
