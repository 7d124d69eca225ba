"""A turn's spans reach a real OTLP receiver, and tracing costs nothing when it is off."""

import asyncio
import random
import string
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import REGISTRY

from router.gateway.config import TracingConfig
from router.gateway.tracing import MOST_WAITING, TurnTracer
from tests.support.fake_fleet import FakeFleet, ask, assistant, fleet, user
from tests.support.log_lines import fields
from tests.support.otlp_receiver import Received, Receiver, otlp_receiver
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
CANARY = "canary-of-a-prompt"
CAUSES = ("queue_full", "not_taken")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as received:
        yield received


async def spans_after(made: FakeFleet, received: Receiver) -> list[Received]:
    """Stop the gateways, so that they send their last spans, and return all spans."""
    for gateway in made.gateways:
        await gateway.stop(1.0)
    made.gateways.clear()
    return received.spans


def dropped() -> dict[str, float]:
    name = "conserve_traces_dropped_total"
    return {cause: REGISTRY.get_sample_value(name, {"cause": cause}) or 0.0 for cause in CAUSES}


def by_name(spans: list[Received]) -> dict[str, Received]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


async def test_the_spans_of_a_first_turn_are_a_tree_of_its_stages_and_legs(
    tmp_path: Path, receiver: Receiver
) -> None:
    tracing = TracingConfig(receiver.endpoint, sample=0.0)  # the client's flag decides
    async with fleet(tmp_path, tracing=tracing) as made:
        answer = await ask(
            made.urls[0], [user(CANARY)], stream=True, headers={"traceparent": SAMPLED, "tracestate": "a=1"}
        )
        assert answer.status == 200
        (prefill,), (decode,) = made.prefills(), made.decoder_requests()
        spans = by_name(await spans_after(made, receiver))
    assert set(spans) == {"turn", "identify", "bind", "prefill leg", "transfer", "decode leg"}
    turn = spans.pop("turn")
    assert (turn.trace, turn.parent) == (TRACE, SPAN)
    assert {span.trace for span in spans.values()} == {TRACE}
    assert {span.parent for span in spans.values()} == {turn.span}
    assert prefill.headers["traceparent"] == spans["prefill leg"].traceparent
    assert decode.headers["traceparent"] == spans["decode leg"].traceparent
    assert prefill.headers["tracestate"] == decode.headers["tracestate"] == "a=1"
    assert spans["bind"].attributes["conserve.decoder"] == spans["decode leg"].attributes["conserve.engine"]
    assert spans["decode leg"].events == ("first token",)
    assert spans["identify"].end_ns <= spans["bind"].end_ns <= spans["decode leg"].begin_ns
    assert spans["transfer"].begin_ns >= spans["prefill leg"].begin_ns
    for span in spans.values():
        assert turn.begin_ns <= span.begin_ns <= span.end_ns <= turn.end_ns
        assert not span.error
        assert CANARY not in repr(span)
    assert turn.attributes["conserve.conversation"].endswith(answer.conversation)
    assert turn.attributes["gen_ai.conversation.id"] == answer.conversation
    assert turn.attributes["gen_ai.operation.name"] == "chat"
    assert turn.attributes["gen_ai.usage.output_tokens"] > 0
    assert turn.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    computed = turn.attributes["conserve.computed_tokens"]
    assert computed == turn.attributes["gen_ai.usage.input_tokens"] > 0


async def test_the_spans_of_a_later_turn_have_no_prefill_leg(tmp_path: Path, receiver: Receiver) -> None:
    async with fleet(tmp_path, tracing=TracingConfig(receiver.endpoint, sample=1.0)) as made:
        messages = [user("hello " * 20)]
        await ask(made.urls[0], messages)
        messages += [assistant("answer"), user("more")]
        await ask(made.urls[0], messages)
        spans = await spans_after(made, receiver)
    turns = [span for span in spans if span.name == "turn"]
    assert len({span.trace for span in turns}) == 2
    later = [span for span in spans if span.trace == turns[1].trace]
    assert set(by_name(later)) == {"turn", "identify", "bind", "decode leg"}
    assert by_name(later)["bind"].attributes["conserve.cause"] == "bound"


async def test_a_broken_prefix_and_its_recomputed_tokens_are_in_the_span_and_the_log(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with fleet(tmp_path, tracing=TracingConfig(receiver.endpoint, sample=1.0)) as made:
        for text in ("hello " * 50, "a summary of it"):
            await ask(made.urls[0], [user(text)], headers={"x-session-id": "s"}, max_tokens=100)
            await made.settle()
        spans = await spans_after(made, receiver)
    whole, edited = (span.attributes for span in spans if span.name == "turn")
    assert "conserve.broken_by" not in whole
    assert edited["conserve.broken_by"] == "edited_history"
    assert edited["conserve.recomputed_tokens"] > 0
    lines = [fields(one.message) for one in caplog.records if one.message.startswith("turn ")]
    assert [line["broken_by"] for line in lines] == ["-", "edited_history"]
    assert int(lines[1]["recomputed"]) == edited["conserve.recomputed_tokens"]
    assert int(lines[1]["cached"]) == edited["gen_ai.usage.cache_read.input_tokens"]


async def test_engines_get_the_headers_of_an_unsampled_turn_unchanged(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with fleet(tmp_path, tracing=TracingConfig(receiver.endpoint, sample=1.0)) as made:
        await ask(made.urls[0], [user("a")], headers={"traceparent": NOT_SAMPLED})
        (decode,) = made.decoder_requests()
        assert decode.headers["traceparent"] == NOT_SAMPLED
        assert await spans_after(made, receiver) == []


@pytest.mark.parametrize("outcome", ["refused", "broken"])
async def test_a_turn_that_fails_leaves_no_span_open(
    tmp_path: Path, receiver: Receiver, outcome: str
) -> None:
    tracing = TracingConfig(receiver.endpoint, sample=1.0)
    async with fleet(
        tmp_path, decoders=2 if outcome == "broken" else 0, tracing=tracing, place_wait_s=0.2
    ) as made:
        if outcome == "broken":
            for engine in made.engines.values():
                engine.fail_status = 500
        answer = await ask(made.urls[0], [user("a")])
        assert answer.status >= 429
        spans = await spans_after(made, receiver)
    (turn,) = [span for span in spans if span.name == "turn"]
    if outcome == "refused":
        assert turn.error and {span.name for span in spans} == {"turn", "identify"}
    else:
        decodes = [span for span in spans if span.name == "decode leg"]
        assert decodes and all(span.error for span in decodes)


def odd_traceparents() -> list[str]:
    rng = random.Random(7)
    odd = ["", "00", "00-" + "0" * 32 + f"-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-x"]
    odd += [f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-zz", "x" * 4000, "\xff\xfe", "00-" * 1000]
    printable = string.printable.replace("\r", "").replace("\n", "").replace("\x0b", "").replace("\x0c", "")
    odd += ["".join(rng.choices(printable, k=rng.randrange(80))).strip() for _ in range(30)]
    return odd


async def test_a_turn_with_a_malformed_traceparent_begins_a_trace_of_its_own(
    tmp_path: Path, receiver: Receiver
) -> None:
    odd = odd_traceparents()
    async with fleet(tmp_path, tracing=TracingConfig(receiver.endpoint, sample=1.0)) as made:
        answers = [await send_raw(made.urls[0], value) for value in odd]
        assert set(answers) == {b"200"}
        turns = [span for span in await spans_after(made, receiver) if span.name == "turn"]
    assert len(turns) == len(odd)
    assert all(not span.parent for span in turns)
    assert len({span.trace for span in turns}) == len(odd)


async def send_raw(url: str, traceparent: str) -> bytes:
    """Send a turn whose `traceparent` has characters that a client library refuses to send."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = b'{"model": "small", "messages": [{"role": "user", "content": "a"}]}'
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntraceparent: {traceparent}\r\ntracestate: =,=\r\n"
    )
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode("latin-1") + body)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer.split(b" ", 2)[1]


async def test_turns_are_served_without_a_receiver_and_their_lost_traces_are_counted(tmp_path: Path) -> None:
    before = dropped()["not_taken"]
    async with fleet(tmp_path, tracing=TracingConfig("http://127.0.0.1:9", sample=1.0)) as made:
        assert (await ask(made.urls[0], [user("a")])).status == 200
    assert dropped()["not_taken"] == before + 1


async def test_a_receiver_that_refuses_spans_for_a_moment_still_gets_all_of_them(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret,x-team=a%20b")
    receiver.refusals = [503]
    before = dropped()
    async with fleet(tmp_path, tracing=TracingConfig(receiver.endpoint, sample=1.0)) as made:
        await ask(made.urls[0], [user("a")])
        spans = await asyncio.to_thread(receiver.until, lambda spans: len(spans) > 0)
    assert "turn" in {span.name for span in spans}
    assert len(receiver.headers) == 2 and not receiver.refusals
    assert {headers["x-key"] for headers in receiver.headers} == {"secret"}
    assert {headers["x-team"] for headers in receiver.headers} == {"a b"}
    assert dropped() == before


async def test_traces_that_the_receiver_refuses_are_counted_and_logged_only_once(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.refusals = [400, 400]
    before = dropped()
    async with fleet(tmp_path, tracing=TracingConfig(receiver.endpoint, sample=1.0)) as made:
        for served in (1, 2):
            assert (await ask(made.urls[0], [user("a" * served)])).status == 200
            await until(lambda served=served: dropped()["not_taken"] == before["not_taken"] + served)
        assert receiver.spans == []
        await ask(made.urls[0], [user("after")])
        await asyncio.to_thread(receiver.until, lambda spans: len(spans) > 0)
    assert len([line for line in caplog.messages if "traces of turns are dropped" in line]) == 1


class Exporter(SpanExporter):
    """Stand-in for an exporter, which calls `before` with the number of each export, in the SDK's thread."""

    def __init__(self, before: Callable[[int], object]) -> None:
        self._before = before
        self.calls = 0
        self.turns = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        self._before(self.calls)
        self.turns += sum(span.name == "turn" for span in spans)
        return SpanExportResult.SUCCESS


def tracer_with(exporter: Exporter) -> TurnTracer:
    return TurnTracer(TracingConfig("http://127.0.0.1:9", sample=1.0), "fleet", "gateway", exporter=exporter)


def serve_a_turn(tracer: TurnTracer) -> None:
    trace = tracer.begin([], 0.0, {})
    assert trace is not None
    with trace:
        trace.identified("space:c", "c", "new")


async def test_a_failed_export_of_spans_does_not_stop_later_exports() -> None:
    def fault_at_first(call: int) -> None:
        if call == 1:
            raise TypeError("a fault")

    before, exporter = dropped()["not_taken"], Exporter(fault_at_first)
    tracer = tracer_with(exporter)
    serve_a_turn(tracer)
    await until(lambda: dropped()["not_taken"] == before + 1)
    serve_a_turn(tracer)
    await until(lambda: exporter.turns == 1)
    tracer.close()


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://", "http://collector:port", "http://c:99999"])
def test_the_error_for_a_malformed_trace_endpoint_says_the_expected_form(endpoint: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        TracingConfig(endpoint)


def test_traces_of_turns_are_dropped_when_too_many_wait_to_be_sent() -> None:
    begun, going, before = threading.Event(), threading.Event(), dropped()

    def wait(_: int) -> None:
        begun.set()
        going.wait(30)

    exporter = Exporter(wait)
    tracer = tracer_with(exporter)
    serve_a_turn(tracer)
    assert begun.wait(30)
    for _ in range(MOST_WAITING + 7):
        serve_a_turn(tracer)
    # The turn that is being sent counts as waiting.
    assert dropped() == {**before, "queue_full": before["queue_full"] + 8}
    going.set()
    tracer.close()
    assert exporter.turns == MOST_WAITING


async def test_tracing_libraries_are_not_loaded_when_tracing_is_off(tmp_path: Path) -> None:
    code = "import sys, router.gateway.main; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert printed.strip() == b"[]"


@pytest.mark.parametrize(
    ("endpoint", "protocol", "expected"),
    [
        ("http://here:4318", "http", "http://here:4318/v1/traces"),
        ("https://langfuse/api/public/otel/", "http", "https://langfuse/api/public/otel/v1/traces"),
        ("https://here/otlp/v1/traces", "http", "https://here/otlp/v1/traces"),
        ("http://here:4317", "grpc", "http://here:4317"),
    ],
)
def test_the_url_for_spans_has_the_path_v1_traces_only_with_protocol_http(
    endpoint: str, protocol: Literal["http", "grpc"], expected: str
) -> None:
    assert TracingConfig(endpoint, protocol=protocol).traces_endpoint == expected


@pytest.mark.parametrize("endpoint", ["https://here:4317", "http://here:4317/path"])
def test_a_grpc_trace_endpoint_with_tls_or_a_path_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="without a path or TLS"):
        TracingConfig(endpoint, protocol="grpc")


async def test_spans_are_posted_to_v1_traces_below_the_path_of_the_endpoint(
    tmp_path: Path, receiver: Receiver
) -> None:
    tracing = TracingConfig(f"{receiver.endpoint}/api/public/otel", sample=1.0)
    async with fleet(tmp_path, tracing=tracing) as made:
        await ask(made.urls[0], [user("one")])
        await made.settle()
    assert receiver.paths == {"/api/public/otel/v1/traces"}
