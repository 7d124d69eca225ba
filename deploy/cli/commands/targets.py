"""conserve targets: list the metric pages of a fleet, for Prometheus."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.common import FleetName, home_of
from deploy.lifecycle.status import discovery, fleet_status, write_targets
from deploy.lifecycle.status import targets as pages

EVERY_S = 10.0


def targets(
    fleet: FleetName = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file, for file_sd_configs")] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Answer http_sd_configs there, until ended")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Write again every 10 s")] = False,
) -> None:
    """Print, write or serve the list of metric pages, for Prometheus's file or HTTP discovery."""
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
            write_targets(out, found)
        if not watch:
            return
        time.sleep(EVERY_S)
