"""Where Prometheus finds a fleet's pages: as its file discovery reads them, or its HTTP discovery asks."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deploy.errors import LifecycleError
from deploy.lifecycle.status import FleetStatus
from workers.processes import write_atomically

Targets = list[dict[str, Any]]


def targets(status: FleetStatus) -> Targets:
    """As the directory and the keepers know them, on whichever machines they are."""
    # No label here may have the name of a label of our metrics: Prometheus would rename the metric's.
    found = [page_of(page, status.fleet, "gateway") for page in status.gateways]
    found += [page_of(page, status.fleet, "batch") for page in status.batch]
    found.append(page_of(status.metrics, status.fleet, "directory"))
    for engine in status.engines:
        labels = {"conserve_tier": engine.tier, "conserve_role": engine.role}
        found.append(page_of(engine.http, status.fleet, "engine", conserve_engine=engine.engine, **labels))
        found.append(page_of(engine.metrics, status.fleet, "keeper", conserve_engine=engine.engine, **labels))
    return [target for target in found if target["targets"] != [""]]


def page_of(address: str, fleet: str, process: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": {"conserve_fleet": fleet, "conserve_process": process, **labels}}


def write(path: Path, found: Targets) -> None:
    """In one step: Prometheus reads the file whenever it changes."""
    write_atomically(path, json.dumps(found, indent=1) + "\n")


def discovery(address: str, look: Callable[[], Targets]) -> ThreadingHTTPServer:
    """A server for `http_sd_configs`, which looks anew for every request; `serve_forever` runs it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, body = 200, json.dumps(look()).encode()
            except LifecycleError as down:  # Prometheus keeps the pages it knew
                status, body = 503, str(down).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json" if status == 200 else "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    host, _, port = address.rpartition(":")
    return ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)
