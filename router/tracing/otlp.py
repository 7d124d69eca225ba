"""Turns' notes as OpenTelemetry's messages: data in, bytes out."""

from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource as FromEnvironment

from router.tracing.turn import Role, SpanNotes, TurnTrace, Value

_SCOPE = "conserve.router"
_KINDS = {
    Role.INTERNAL: Span.SPAN_KIND_INTERNAL,
    Role.SERVER: Span.SPAN_KIND_SERVER,
    Role.CLIENT: Span.SPAN_KIND_CLIENT,
}
_HERE = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_ELSEWHERE = _HERE | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


def resource(fleet: str, gateway: str) -> Resource:
    """With what OTEL_RESOURCE_ATTRIBUTES says."""
    ours = {
        "service.name": "conserve-gateway",
        "service.namespace": fleet,
        "service.instance.id": gateway,
    }
    message = Resource()
    for key, value in FromEnvironment.create(ours).attributes.items():
        pair = message.attributes.add()
        pair.key, pair.value.string_value = key, str(value)
    return message


def encode(made_by: Resource, turns: Iterable[TurnTrace]) -> bytes:
    scope = ScopeSpans(scope=InstrumentationScope(name=_SCOPE))
    for turn in turns:
        _add(scope, turn)
    spans = ResourceSpans(resource=made_by, scope_spans=[scope])
    return ExportTraceServiceRequest(resource_spans=[spans]).SerializeToString()


def _add(scope: ScopeSpans, turn: TurnTrace) -> None:
    parent, offset = turn.parent, turn.clock_to_time_of_day_ns
    trace = parent.trace.to_bytes(16, "big")
    of_turn = turn.turn.id.to_bytes(8, "big")
    before = b"" if parent.span is None else parent.span.to_bytes(8, "big")
    for notes in turn.spans:
        outer = notes is turn.turn
        span = scope.spans.add(
            trace_id=trace,
            span_id=notes.id.to_bytes(8, "big"),
            parent_span_id=before if outer else of_turn,
            trace_state=parent.state,
            flags=_ELSEWHERE if outer and before else _HERE,
            name=notes.name,
            kind=_KINDS[notes.role],
            start_time_unix_nano=offset + int(notes.began_at * 1e9),
            end_time_unix_nano=offset + int((notes.ended_at or notes.began_at) * 1e9),
        )
        _add_attributes(span, notes.attributes)
        _add_outcome(span, notes, offset)


def _add_attributes(span: Span, attributes: Mapping[str, Value]) -> None:
    for key, value in attributes.items():
        pair = span.attributes.add()
        pair.key = key
        if isinstance(value, int):
            pair.value.int_value = value
        else:
            pair.value.string_value = value


def _add_outcome(span: Span, notes: SpanNotes, offset: int) -> None:
    if notes.first_token_at is not None:
        span.events.add(name="first token", time_unix_nano=offset + int(notes.first_token_at * 1e9))
    if notes.wrong is not None:
        span.status.code, span.status.message = Status.STATUS_CODE_ERROR, notes.wrong
