"""conserve top: the dashboard in the terminal."""

import json
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from deploy.cli.errors import CommandError
from deploy.cli.top_view import render

TIMEOUT_S = 5.0
PATIENCE = 10  # answers missed in a row before giving up


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    url: Annotated[str, typer.Option(help="The gateway.")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(envvar="CONSERVE_ADMIN_KEY", help="An admin key, if asked for.")] = "",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
) -> None:
    """Engines and conversations as they move. Ctrl-C ends it."""
    console = Console()
    state = look(url, key)
    if once:
        console.print(render(state, lanes=20))
        return
    missed = 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                lanes = max(3, console.height - 10 - len(state["engines"]))
                live.update(render(state, lanes), refresh=True)
                time.sleep(every)
                try:
                    state, missed = look(url, key), 0
                except CommandError as wrong:
                    missed += 1
                    if missed >= PATIENCE:
                        raise
                    state = {**state, "notice": str(wrong)}
        except KeyboardInterrupt:
            return


def look(url: str, key: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{url.rstrip('/')}/dashboard/state")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            state: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as wrong:
        hint = "; pass --key with one of gateway.admin_keys" if wrong.code in (401, 403) else ""
        raise CommandError(f"{url} answered {wrong.code}{hint}") from wrong
    except (OSError, ValueError) as wrong:
        raise CommandError(f"no gateway answers at {url}: {wrong}; is the fleet up?") from wrong
    return state
