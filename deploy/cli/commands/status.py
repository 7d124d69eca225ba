"""conserve status: show the engines of a fleet."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from deploy.cli.common import AsJson, FleetName, home_of
from deploy.lifecycle.status import FleetStatus, fleet_status


def status(
    fleet: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Show the engines of a fleet: their state, their requests and their KV."""
    found = fleet_status(home_of(fleet))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    Console().print(_table(found))
    if line := in_words(found):
        print(line)


def in_words(found: FleetStatus) -> str:
    """Return a sentence on a problem that the table of engines does not show; empty if there is none."""
    if found.starting:
        serving = sum(engine.phase == "serving" for engine in found.engines)
        since = f"Starting for {found.seconds:.0f} s" if found.seconds else "Starting"
        return f"{since}: {serving} of {len(found.engines)} engines serve; the endpoint is open when all do."
    if found.lost:
        return f"Its supervisor is gone: nobody restarts Ray; to end what runs: conserve down {found.fleet}"
    if not found.reachable:
        return "The directory does not answer: gateways serve the conversations they know, and no new ones."
    if found.journal_problem:
        return f"New conversations get 503: {found.journal_problem}."
    return ""


def _table(found: FleetStatus) -> Table:
    table = Table(title=f"{found.fleet}  {found.endpoint}", title_justify="left", box=None, pad_edge=False)
    if found.starting:
        for column in ("engine", "role", "state"):
            table.add_column(column)
        for engine in found.engines:
            table.add_row(engine.engine, engine.role, engine.in_words)
        return table
    for column in ("engine", "role", "pid", "KV", "parked", "runs", "conversations", "starts", "state"):
        left = column in ("engine", "role", "state")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "state")
    for engine in found.engines:
        used = f"{engine.live_tokens / engine.kv_tokens:.0%}" if engine.kv_tokens else ""
        table.add_row(
            *(engine.engine, engine.role, str(engine.pid or ""), used, str(engine.parked_tokens)),
            *(str(engine.running), str(engine.conversations), str(engine.restarts + 1)),
            engine.in_words,
        )
    return table
