"""conserve targets [FLEET]: where Prometheus finds the fleet's pages."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.names import home_of
from deploy.lifecycle.status import fleet_status
from deploy.observe.targets import discovery, write
from deploy.observe.targets import targets as pages

EVERY_S = 10.0


def register(app: typer.Typer) -> None:
    app.command()(targets)


def targets(
    fleet: Annotated[str, typer.Argument(help="its name or file")] = "laptop",
    out: Annotated[Path | None, typer.Option(help="write there, for file_sd_configs")] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="answer http_sd_configs there, until ended")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="write again every 10 s: engines move")] = False,
) -> None:
    """Print, keep or serve the list of metric pages, for Prometheus' file or HTTP discovery."""
    home = home_of(fleet)
    if serve is not None:
        with discovery(serve, lambda: pages(fleet_status(home))) as server:
            print(
                f"http_sd_configs: [{{url: http://{server.server_name}:{server.server_port}/}}]", flush=True
            )
            server.serve_forever()
    while True:
        found = pages(fleet_status(home))
        if out is None:
            print(json.dumps(found, indent=1))
        else:
            write(out, found)
        if not watch:
            return
        time.sleep(EVERY_S)
