"""Which turns are traced, and whose trace they continue."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers

from router.config import Tracing
from router.http import RawHeaders
from router.tracing import otlp
from router.tracing.sender import Sender
from router.tracing.turn import PROPAGATED, Parent, TurnTrace

if TYPE_CHECKING:
    from router.turn import Turn

_READER = TraceContextTextMapPropagator()
_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"  # a receiver's key, as its documents say to set it
_LAST_S = 2.0  # for what waits when the gateway stops


class Tracer:
    """Of one gateway process."""

    def __init__(
        self, settings: Tracing, fleet: str, gateway: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        made_by = otlp.resource(fleet, gateway)
        headers = parse_env_headers(os.environ.get(_HEADERS, ""), liberal=True)
        self._sender = Sender(settings.endpoint, lambda turns: otlp.encode(made_by, turns), headers)
        self._clock = clock
        self._sample, self._draw = settings.sample, random.random

    def traced(self, turn: "Turn") -> "Turn":
        """The turn with its trace, or the same turn when it is not sampled."""
        said = _said(turn.headers)
        if said is None:
            if self._draw() >= self._sample:
                return turn
            parent = Parent(random.getrandbits(128))
        elif said.trace_flags.sampled:
            parent = Parent(said.trace_id, said.span_id, said.trace_state.to_header())
        else:
            return turn
        offset_ns = time.time_ns() - int(self._clock() * 1e9)
        trace = TurnTrace(parent, self._clock, offset_ns, turn.arrived_at, self._sender.add)
        trace.turn.attributes = {"conserve.api": turn.api.value, "conserve.body_bytes": len(turn.raw)}
        return replace(turn, trace=trace)

    def close(self) -> None:
        self._sender.close(_LAST_S)


def _said(headers: RawHeaders) -> SpanContext | None:
    """What the client's headers say; None without them, and for what cannot be read."""
    found: dict[str, str] = {}
    for field, value in headers:
        if field.lower() in PROPAGATED:
            found.setdefault(field.lower().decode(), value.decode("latin-1"))
    if "traceparent" not in found:
        return None
    context = get_current_span(_READER.extract(found, context=Context())).get_span_context()
    return context if context.is_valid else None
