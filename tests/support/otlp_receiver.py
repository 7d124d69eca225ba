"""OTLP receiver over HTTP that keeps all spans."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_LIMIT_S = 60.0


@dataclass(frozen=True)
class Received:
    name: str
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: bool
    service: str
    events: tuple[str, ...] = ()

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.span}-01"


@dataclass
class Receiver:
    endpoint: str
    spans: list[Received] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)  # statuses for the next requests
    headers: list[dict[str, str]] = field(default_factory=list)  # of every request
    paths: set[str] = field(default_factory=set)

    def until(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        """Wait until `enough` holds for the received spans, which may take seconds; return the spans."""
        end = time.monotonic() + _LIMIT_S
        while not enough(list(self.spans)):
            assert time.monotonic() < end, [span.name for span in self.spans]
            time.sleep(0.05)
        return list(self.spans)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    class OtlpHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.paths.add(self.path)
            received.headers.append({name.lower(): value for name, value in self.headers.items()})
            if received.refusals:
                self.send_response(received.refusals.pop(0))
                self.send_header("content-length", "0")
                self.end_headers()
                return
            received.spans.extend(_read(ExportTraceServiceRequest.FromString(body)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), OtlpHandler)
    received = Receiver(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


def _read(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    span.name,
                    *(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()),
                    *(span.start_time_unix_nano, span.end_time_unix_nano),
                    _values(span.attributes),
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    service,
                    tuple(event.name for event in span.events),
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
