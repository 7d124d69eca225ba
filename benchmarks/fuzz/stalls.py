"""How long a gateway lets its simplest request wait, beside a server that has nothing else to do; and how
often its loop was held longer than `MOST_S` by what it did, in processor time."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

MOST_S = 0.05
EVERY_S = 0.02
LIMIT_S = 30.0


class _Nothing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def held(url: str) -> int:
    """Times, since the gateway began."""
    counts = {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=LIMIT_S).text)
        for sample in family.samples
        if sample.name == "conserve_loop_held_seconds_bucket"
    }
    return round(counts["+Inf"] - counts[str(MOST_S)])


def watch(url: str, pipe: Connection) -> None:
    """In a process of its own, until something comes through the pipe; then the figures go back."""
    split = urlsplit(url)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Nothing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = http.client.HTTPConnection(str(split.hostname), split.port, timeout=LIMIT_S)
    here = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT_S)
    theirs, own = [], []
    while not pipe.poll(EVERY_S):
        own.append(_took(here))
        theirs.append(_took(there))
    pipe.send(
        {
            "longest_stall_s": round(max(theirs, default=0.0), 4),
            "stall_p999_s": round(_at(theirs, 0.999), 4),
            "longest_stall_of_an_idle_server_s": round(max(own, default=0.0), 4),
            "stall_p999_of_an_idle_server_s": round(_at(own, 0.999), 4),
        }
    )


def _took(connection: http.client.HTTPConnection) -> float:
    began = time.perf_counter()
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        connection.close()
    return time.perf_counter() - began


def _at(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0
