"""Stalls of a gateway: its response times for GET /health, those of an idle server, and blocked loops."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from benchmarks.harness.fleet import counted
from benchmarks.harness.output import quantile

HOLD_S = 0.05  # of processor time
EVERY_S = 0.02
LIMIT_S = 30.0


class IdleServer(BaseHTTPRequestHandler):
    """Handler of a server without any load, which answers every request immediately."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def long_holds(url: str) -> int:
    """Return how often the gateway's event loop was blocked for longer than `HOLD_S` since its start."""
    name = "conserve_loop_held_seconds_bucket"
    return round(counted([url], name, le="+Inf") - counted([url], name, le=str(HOLD_S)))


def watch(pipe: Connection, url: str) -> None:
    """Probe the gateway and an idle server until a message arrives on the pipe; then send the figures."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), IdleServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    split = urlsplit(url)
    gateway = http.client.HTTPConnection(str(split.hostname), split.port, timeout=LIMIT_S)
    idle = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT_S)
    waits: list[float] = []
    idle_waits: list[float] = []
    while not pipe.poll(EVERY_S):
        idle_waits.append(_probe_s(idle))
        waits.append(_probe_s(gateway))
    pipe.send(
        {
            "longest_stall_s": round(max(waits, default=0.0), 4),
            "stall_p999_s": round(quantile(waits, 0.999), 4),
            "longest_stall_of_an_idle_server_s": round(max(idle_waits, default=0.0), 4),
            "stall_p999_of_an_idle_server_s": round(quantile(idle_waits, 0.999), 4),
        }
    )


def _probe_s(connection: http.client.HTTPConnection) -> float:
    began = time.perf_counter()
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        connection.close()
    return time.perf_counter() - began
