"""Spans of sampled turns, sent by OTLP: identify, bind, prefill leg, transfer, decode leg.

A client's `traceparent` decides whether its turn is sampled; without one a share of the turns is. A sampled
turn's engines get a `traceparent` that names their leg's span; any other turn passes with its headers as they
came. Spans are made a few times a turn, never a token, and are sent from a thread with a bounded queue: what
a slow receiver does not take is dropped.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as OpenTelemetryTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.config import Tracing
from router.http import RawHeaders

if TYPE_CHECKING:
    from router.turn import Turn

_PROPAGATED = frozenset({b"traceparent", b"tracestate"})
_CONTEXT = TraceContextTextMapPropagator()
_SEND_S = 5.0  # one try to send a group of spans
_LAST_MS = 2000  # for what is queued when the gateway stops


class Tracer:
    """Of one gateway process."""

    def __init__(
        self, settings: Tracing, fleet: str, gateway: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        resource = Resource.create(
            {"service.name": "conserve-gateway", "service.namespace": fleet, "service.instance.id": gateway}
        )
        exporter = OTLPSpanExporter(endpoint=f"{settings.endpoint.rstrip('/')}/v1/traces", timeout=_SEND_S)
        self._provider = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("conserve.router")
        self._clock = clock
        self._sample, self._draw = settings.sample, random.random

    def traced(self, turn: "Turn") -> "Turn":
        """The turn with its trace, or the same turn when it is not sampled."""
        parent = _parent(turn.headers)
        if parent is None:
            if self._draw() >= self._sample:
                return turn
        elif not get_current_span(parent).get_span_context().trace_flags.sampled:
            return turn
        time_of_day = TimeOfDay(self._clock)
        span = self._tracer.start_span(
            "turn",
            context=parent or Context(),
            kind=SpanKind.SERVER,
            attributes={"conserve.api": turn.api.value, "conserve.body_bytes": len(turn.raw)},
            start_time=time_of_day.at(turn.arrived_at),
        )
        return replace(turn, trace=TurnTrace(self._tracer, span, time_of_day, turn.arrived_at))

    def close(self) -> None:
        self._provider.force_flush(_LAST_MS)
        self._provider.shutdown()


class TimeOfDay:
    """Spans have the time of day and the gateway's clock does not: set once a turn, so that its spans fit."""

    __slots__ = ("_clock", "_offset_ns")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offset_ns = time.time_ns() - int(clock() * 1e9)

    def at(self, moment: float) -> int:
        return self._offset_ns + int(moment * 1e9)

    def now(self) -> int:
        return self.at(self._clock())


class TurnTrace:
    """The spans of one turn. The stages follow one another; the legs may overlap."""

    __slots__ = ("_decode", "_prefill", "_prefilled_at", "_since", "_span", "_time", "_tracer")

    def __init__(
        self, tracer: OpenTelemetryTracer, span: Span, time_of_day: TimeOfDay, arrived: float
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._time = time_of_day
        self._since = time_of_day.at(arrived)  # where the next stage begins
        self._prefill: Span | None = None
        self._decode: Span | None = None
        self._prefilled_at: int | None = None

    def identified(self, conversation: str, how: str) -> None:
        self._span.set_attribute("conserve.conversation", conversation)
        self._stage("identify", {"conserve.how": how})

    def bound(self, cause: str, decoder: str, prefiller: str | None) -> None:
        chosen = {"conserve.cause": cause, "conserve.decoder": decoder}
        self._stage("bind", {**chosen, "conserve.prefiller": prefiller} if prefiller else chosen)

    def prefilling(self, turn: "Turn", engine: str) -> "Turn":
        self._prefill, sent = self._leg("prefill leg", turn, engine)
        return sent

    def decoding(self, turn: "Turn", engine: str) -> "Turn":
        self._decode, sent = self._leg("decode leg", turn, engine)
        return sent

    def prefilled(self, prompt_tokens: int) -> None:
        """`prompt_tokens` is 0 when the leg failed, and the decoder computes the prompt."""
        self._prefilled_at = self._time.now()
        if (span := self._prefill) is not None:
            span.set_attribute("conserve.prompt_tokens", prompt_tokens)
            if not prompt_tokens:
                span.set_status(Status(StatusCode.ERROR, "the decoder computes the prompt"))
            span.end(self._prefilled_at)

    def decoded(self, outcome: str, complete: bool, first_token_at: float | None) -> None:
        """`transfer` is what the KV's way adds as its reader sees it: from the prefill's answer to the first
        token. Of an answer that is not a stream nobody sees the first token, so it has no such span."""
        first_token = None if first_token_at is None else self._time.at(first_token_at)
        if first_token is not None and self._prefilled_at is not None:
            moved = self._start("transfer", SpanKind.INTERNAL, self._prefilled_at)
            moved.end(max(first_token, self._prefilled_at))
        if (span := self._decode) is not None:
            if first_token is not None:
                span.add_event("first token", timestamp=first_token)
            span.set_attribute("conserve.outcome", outcome)
            if not complete:
                span.set_status(Status(StatusCode.ERROR, outcome))
            span.end(self._time.now())
        self._prefilled_at = self._prefill = self._decode = None
        self._since = self._time.now()  # a turn whose decoder was lost is bound again

    def answered(self, prompt_tokens: int, output_tokens: int) -> None:
        self._span.set_attributes(
            {"conserve.prompt_tokens": prompt_tokens, "conserve.output_tokens": output_tokens}
        )

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Also of a turn that was refused or broke off: nothing stays open."""
        for span in (self._prefill, self._decode, self._span):
            if span is not None and span.is_recording():
                if kind is not None:
                    span.set_status(Status(StatusCode.ERROR, kind.__name__))
                span.end(self._time.now())

    def _leg(self, name: str, turn: "Turn", engine: str) -> "tuple[Span, Turn]":
        """Its span, and the turn as the engine gets it: with a `traceparent` that names this leg."""
        span = self._start(name, SpanKind.CLIENT, self._time.now())
        span.set_attribute("conserve.engine", engine)
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, set_span_in_context(span, Context()))
        kept = [pair for pair in turn.headers if pair[0].lower() not in _PROPAGATED]
        named = [(field.encode(), value.encode("latin-1")) for field, value in carrier.items()]
        return span, replace(turn, headers=[*kept, *named])

    def _stage(self, name: str, attributes: dict[str, str]) -> None:
        span = self._start(name, SpanKind.INTERNAL, self._since)
        span.set_attributes(attributes)
        self._since = self._time.now()
        span.end(self._since)

    def _start(self, name: str, kind: SpanKind, at: int) -> Span:
        parent = set_span_in_context(self._span, Context())
        return self._tracer.start_span(name, context=parent, kind=kind, start_time=at)


def _parent(headers: RawHeaders) -> Context | None:
    """What the client's headers say; None without them, and for what cannot be read."""
    found: dict[str, str] = {}
    for field, value in headers:
        if field.lower() in _PROPAGATED:
            found.setdefault(field.lower().decode(), value.decode("latin-1"))
    if "traceparent" not in found:
        return None
    context = _CONTEXT.extract(found, context=Context())
    return context if get_current_span(context).get_span_context().is_valid else None
