"""OpenTelemetry spans of sampled turns: identify, bind, prefill leg, transfer, decode leg.

A client's `traceparent` decides whether its turn is sampled; without one, a share of the turns is. Engines of
a sampled turn get a `traceparent` that names the span of their leg; the headers of other turns do not change.
No work is done per token. The SDK's thread sends spans to an OTLP receiver, and turns never wait for it.
Spans that a slow or missing receiver does not take are dropped and counted; one log line says when dropping
begins. Attributes follow OpenTelemetry's conventions for generative AI (`gen_ai.*`); others are named
`conserve.*`. This module is loaded only where the fleet file asks for it (tests/router/test_tracing.py).
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router import metrics
from router.gateway.config import TracingConfig
from router.http import RawHeaders

log = logging.getLogger("conserve.router.tracing")

MOST_WAITING = 2048  # turns
_SPANS_A_TURN = 16  # at most: the SDK's queue has room for `MOST_WAITING` turns with so many spans
_SPANS_A_MESSAGE = 1536  # some 256 turns, 200 kB
_EVERY_S = 1.0
_SEND_S = 5.0  # for one message, with retries and pauses
_LAST_S = 2.0  # for waiting spans when the gateway stops
_CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})
_PROPAGATOR = TraceContextTextMapPropagator()

Value: TypeAlias = str | int | tuple[str, ...]


class TurnTracer:
    """Samples the turns of one gateway process, and sends their spans."""

    def __init__(
        self,
        config: TracingConfig,
        fleet: str,
        gateway: str,
        clock: Callable[[], float] = time.monotonic,
        exporter: SpanExporter | None = None,
    ) -> None:
        resource = {
            "service.name": "conserve-gateway",
            "service.namespace": fleet,
            "service.instance.id": gateway,
        }
        # The SDK reads more resource attributes from OTEL_RESOURCE_ATTRIBUTES, and the receiver's key from
        # OTEL_EXPORTER_OTLP_HEADERS.
        self._exporter = _CountingExporter(exporter or _otlp_exporter(config))
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(resource), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, MOST_WAITING * _SPANS_A_TURN, _EVERY_S * 1e3, _SPANS_A_MESSAGE)
        )
        self._tracer = self._provider.get_tracer("conserve.router")
        self._clock, self._sample, self._draw = clock, config.sample, random.random

    def begin(
        self, headers: RawHeaders, arrived_at: float, attributes: Mapping[str, Value]
    ) -> "TurnTrace | None":
        """Begin the trace of a turn that has `headers`; return None if the turn is not sampled."""
        carrier: dict[str, str] = {}
        for field, value in headers:
            if (name := field.lower()) in _CONTEXT_HEADERS:
                carrier.setdefault(name.decode(), value.decode("latin-1"))
        context = _PROPAGATOR.extract(carrier, context=Context())
        client = get_current_span(context).get_span_context()
        if not (client.trace_flags.sampled if client.is_valid else self._draw() < self._sample):
            return None
        offset_ns = time.time_ns() - int(self._clock() * 1e9)
        trace = TurnTrace(self._tracer, context, self._clock, offset_ns, arrived_at, self._exporter.admit)
        trace.set_attributes(attributes)
        return trace

    def close(self) -> None:
        """Send the spans that wait to be sent, for two seconds at most."""
        limit = threading.Timer(_LAST_S, self._exporter.shutdown)
        limit.start()
        self._provider.shutdown()
        limit.cancel()


class TurnTrace:
    """Spans of one turn. The stages follow one another; the legs may overlap."""

    def __init__(
        self,
        tracer: Tracer,
        context: Context,
        clock: Callable[[], float],
        clock_to_time_of_day_ns: int,
        arrived_at: float,
        admit: Callable[[], bool],
    ) -> None:
        self._tracer, self._clock, self._admit = tracer, clock, admit
        self._offset_ns = clock_to_time_of_day_ns  # fixed for the turn, so that its spans are consistent
        self._turn = tracer.start_span("turn", context, SpanKind.SERVER, start_time=self._ns(arrived_at))
        self._context = set_span_in_context(self._turn, Context())
        self._spans: dict[Span, float | None] = {}  # children of the turn's span, and when each ended
        self._since = arrived_at  # when the next stage begins
        self._prefilled_at: float | None = None
        self._legs: dict[str, Span] = {}

    def set_attributes(self, attributes: Mapping[str, Value]) -> None:
        self._turn.set_attributes(attributes)

    def identified(self, key: str, conversation: str, how: str) -> None:
        """Add the span of the stage `identify`. `conversation` is the id that the client knows."""
        self.set_attributes({"conserve.conversation": key, "gen_ai.conversation.id": conversation})
        self._stage("identify", {"conserve.how": how})

    def bound(self, cause: str, decoder: str, prefiller: str | None) -> None:
        """Add the span of the stage `bind`, with the engines that were chosen and the cause."""
        chosen: dict[str, Value] = {"conserve.cause": cause, "conserve.decoder": decoder}
        if prefiller:
            chosen["conserve.prefiller"] = prefiller
        self._stage("bind", chosen)

    def leg(self, name: str, headers: RawHeaders, engine: str) -> RawHeaders:
        """Begin the span of the leg `name`; return `headers` with a `traceparent` that names this span."""
        span = self._begin(name, SpanKind.CLIENT, self._clock(), {"conserve.engine": engine})
        self._legs[name] = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        kept = [pair for pair in headers if pair[0].lower() not in _CONTEXT_HEADERS]
        return [*kept, *((field.encode(), value.encode("latin-1")) for field, value in carrier.items())]

    def prefilled(self, prompt_tokens: int) -> None:
        """End the span of the prefill leg. `prompt_tokens` is 0 if the leg failed."""
        self._prefilled_at = self._clock()
        if (span := self._legs.pop("prefill leg", None)) is not None:
            span.set_attribute("conserve.prompt_tokens", prompt_tokens)
            if not prompt_tokens:
                span.set_status(Status(StatusCode.ERROR, "the decoder computes the prompt"))
            self._spans[span] = self._prefilled_at

    def decoded(self, outcome: str, complete: bool, first_token_at: float | None) -> None:
        """End the span of the decode leg; add a span `transfer` from the prefill's end to the first token.

        An answer that is not a stream shows no first token, and therefore gets no span `transfer`.
        """
        now = self._clock()
        if first_token_at is not None and (prefilled := self._prefilled_at) is not None:
            moved = self._begin("transfer", SpanKind.INTERNAL, prefilled, {})
            self._spans[moved] = max(first_token_at, prefilled)
        if (span := self._legs.pop("decode leg", None)) is not None:
            if first_token_at is not None:
                span.add_event("first token", timestamp=self._ns(first_token_at))
            span.set_attribute("conserve.outcome", outcome)
            if not complete:
                span.set_status(Status(StatusCode.ERROR, outcome))
            self._spans[span] = now
        self._prefilled_at = None
        self._legs.clear()
        self._since = now  # a turn whose decoder was lost is bound again

    def answered(
        self,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        response_id: str | None,
        finish: str | None,
        broken: tuple[str, int] | None,
    ) -> None:
        """Add token counts and the finish reason to the attributes of the turn's span.

        `broken`: why the prompt did not continue the conversation's KV, and the tokens computed again for it.
        """
        counted = {"input": prompt_tokens, "cache_read.input": cached_tokens, "output": output_tokens}
        self.set_attributes({f"gen_ai.usage.{side}_tokens": tokens for side, tokens in counted.items()})
        self.set_attributes({"conserve.computed_tokens": max(0, prompt_tokens - cached_tokens)})
        if broken is not None:
            self.set_attributes({"conserve.broken_by": broken[0], "conserve.recomputed_tokens": broken[1]})
        if response_id:
            self.set_attributes({"gen_ai.response.id": response_id})
        if finish:
            self.set_attributes({"gen_ai.response.finish_reasons": (finish,)})

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all spans of the turn, even after an error. They are sent together or not at all."""
        if not self._admit():
            return
        now = self._clock()
        for span, ended_at in (*self._spans.items(), (self._turn, None)):
            if ended_at is None and kind is not None:
                span.set_status(Status(StatusCode.ERROR, kind.__name__))
            span.end(self._ns(now if ended_at is None else ended_at))

    def _begin(self, name: str, kind: SpanKind, at: float, attributes: Mapping[str, Value]) -> Span:
        span = self._tracer.start_span(name, self._context, kind, attributes, start_time=self._ns(at))
        self._spans[span] = None
        return span

    def _stage(self, name: str, attributes: Mapping[str, Value]) -> None:
        now = self._clock()
        self._spans[self._begin(name, SpanKind.INTERNAL, self._since, attributes)] = now
        self._since = now

    def _ns(self, at: float) -> int:
        return self._offset_ns + int(at * 1e9)


def _otlp_exporter(config: TracingConfig) -> SpanExporter:
    """Return the exporter of the configured protocol; only that protocol's library is loaded."""
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(config.traces_endpoint, timeout=_SEND_S)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter(config.traces_endpoint, timeout=_SEND_S)


class _CountingExporter(SpanExporter):
    """Exporter that limits how many turns wait for export, and counts those whose spans are dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._admitted = 0  # turns; written by the event loop's thread
        self._handled = 0  # turns; written by the SDK's thread
        self._dropping = self._ended = False

    def admit(self) -> bool:
        if self._admitted - self._handled >= MOST_WAITING:
            self._dropped("queue_full", 1)
            return False
        self._admitted += 1
        return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        turns = sum(span.name == "turn" for span in spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:  # the SDK continues after an exception, and logs it
            self._handled += turns
            if result is SpanExportResult.SUCCESS:
                self._dropping = False
            else:
                self._dropped("not_taken", turns)
        return result

    def shutdown(self) -> None:
        if not self._ended:
            self._ended = True
            self._exporter.shutdown()

    def _dropped(self, cause: str, turns: int) -> None:
        metrics.TRACES_DROPPED.labels(cause).inc(turns)
        if not self._dropping:
            self._dropping = True
            log.warning("traces of turns are dropped cause=%s", cause)
