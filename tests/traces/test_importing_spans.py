"""OpenTelemetry spans of agents become conversations, from collectors and from data sets."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from traces import TraceError
from traces.format import TraceConversation, TurnEnding, check
from traces.importers import detect, import_files

SECOND = 1_000_000_000


def call(prompt: int, output: int, finish: str = "tool_calls", **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    said |= {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output}
    return said | {"gen_ai.response.finish_reasons": (finish,)} | more


def collected(file: Path, calls: list[tuple[float, float, dict[str, Any]]]) -> Path:
    """Write spans with OpenTelemetry's SDK as a collector's file exporter does: one OTLP document a line."""
    provider, memory = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("agents")
    for began, ended, attributes in calls:
        span = tracer.start_span("chat m", start_time=int(1e18 + began * SECOND), attributes=attributes)
        span.end(int(1e18 + ended * SECOND))
    tracer.start_span("execute_tool", attributes={"gen_ai.operation.name": "execute_tool"}).end()
    lines = [MessageToJson(encode_spans([span]), indent=None) for span in memory.get_finished_spans()]
    file.write_text("\n".join(lines) + "\n")
    return file


def imported(file: Path) -> tuple[TraceConversation, ...]:
    found = import_files([file]).conversations
    for conversation in found:
        check(conversation)
    return found


def test_spans_with_the_same_conversation_id_become_turns_of_one_conversation(tmp_path: Path) -> None:
    talk = {"gen_ai.conversation.id": "talk"}
    calls = [
        (10.0, 12.0, call(9_000, 100, **talk)),
        (15.0, 16.0, call(9_400, 50, "stop", **talk)),
        (11.0, 11.5, call(300, 10, "length", **{"gen_ai.conversation.id": "other"})),
    ]
    file = collected(tmp_path / "spans", calls)
    assert detect(file).name == "otel"
    first, second = imported(file)
    assert (first.id, first.arrival_s, second.id, second.arrival_s) == ("talk", 0.0, "other", 1.0)
    opening, later = first.turns
    assert (opening.cached_tokens, opening.appended_tokens, opening.output_tokens) == (0, 9_000, 100)
    assert (later.cached_tokens, later.appended_tokens) == (9_100, 300)
    assert (later.wait_s, later.served_s) == pytest.approx((3.0, 1.0))
    assert (opening.ending, later.ending) == (TurnEnding.TOOL_USE, TurnEnding.END_OF_TURN)
    assert second.turns[0].ending is TurnEnding.CUT
    assert first.model_class == "m"


def test_calls_of_a_trace_without_ids_are_one_conversation_until_a_prompt_is_shorter(
    tmp_path: Path,
) -> None:
    spans = [
        {
            "span_id": "b",
            "start_time": "2026-01-01T00:00:05Z",
            "end_time": "2026-01-01T00:00:06Z",
            "attributes": call(2_000, 20),
        },
        {
            "span_id": "a",
            "start_time": "2026-01-01T00:00:00Z",
            "end_time": "2026-01-01T00:00:02Z",
            "attributes": call(1_000, 20),
        },
        {
            "span_id": "c",
            "start_time": "2026-01-01T00:00:07Z",
            "end_time": "2026-01-01T00:00:08Z",
            "attributes": call(200, 5),
        },
    ]
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps({"trace_id": "t", "benchmark": "x", "spans": json.dumps(spans)}) + "\n")
    first, second = imported(file)
    assert [turn.prompt_tokens for turn in first.turns] == [1_000, 2_000]
    assert first.turns[1].cached_tokens == 1_020
    assert (second.id, second.turns[0].prompt_tokens, second.arrival_s) == ("t/1", 200, 7.0)


def test_messages_decide_which_tokens_calls_share_and_which_calls_begin_a_conversation(
    tmp_path: Path,
) -> None:
    """An agent asks which tools it may need, in calls outside its conversation."""
    system, question = {"role": "system", "parts": "s" * 3_000}, {"role": "user", "parts": "q" * 900}
    answer, result = {"role": "assistant", "parts": "a" * 50}, {"role": "tool", "parts": "r" * 400}
    compacted = [system, {"role": "user", "parts": "summary"}]
    prompts: list[list[dict[str, str]]] = [
        [system, question],
        [{"role": "system", "parts": "choose tools"}, question],
        [system, question, answer, result],
        compacted,
    ]
    calls = [
        (float(at), at + 0.5, call(1_000 + at, 10, **{"gen_ai.input.messages": json.dumps(messages)}))
        for at, messages in enumerate(prompts)
    ]
    for _, _, attributes in calls:
        attributes["gen_ai.conversation.id"] = "c"
    main, *others = imported(collected(tmp_path / "spans", calls))
    assert [turn.prompt_tokens for turn in main.turns] == [1_000, 1_002]
    share = main.turns[1].cached_tokens / 1_002
    assert 0.85 < share < 0.95, "all but the tool's result"
    assert [len(other.turns) for other in others] == [1, 1]


def test_overlapping_calls_become_separate_conversations_and_unfinished_calls_are_ignored(
    tmp_path: Path,
) -> None:
    at = 1_700_000_000_000  # milliseconds
    spans = [
        {"start_time": at, "end_time": at + 1_000, "attributes": call(100, 5)},
        {"start_time": at + 500, "end_time": at + 900, "attributes": call(200, 5)},
        {"start_time": at + 2_000, "attributes": call(300, 5)},  # it never ended
        {
            "start_time": at + 3_000,
            "end_time": at + 4_000,
            "attributes": call(400, 5, **{"gen_ai.input.messages": '[{"role": "us'}),
        },  # cut off by a collector
    ]
    file = tmp_path / "spans.json"
    file.write_text(json.dumps({"spans": spans}))
    first, second = imported(file)
    assert [turn.prompt_tokens for turn in first.turns] in ([100, 400], [100])
    assert [turn.prompt_tokens for turn in second.turns] in ([200], [200, 400])
    assert first.turns[0].served_s == 1.0


@pytest.mark.parametrize(
    "content",
    [
        '{"resourceSpans": []}',
        '{"spans": [{"attributes": {"gen_ai.operation.name": "execute_tool"}}]}',
        '{"spans": [{"attributes": {"gen_ai.usage.input_tokens": 5}}]}',
        '{"spans": [{"attributes": {"gen_ai.usage.input_tokens": "many"}}]}',
        '{"spans": "no list"}',
        '{"spans": [7]}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": 7}]}]}]}',
    ],
)
def test_a_span_file_without_valid_calls_is_refused_by_its_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "spans.json"
    file.write_text(content)
    with pytest.raises(TraceError, match=r"spans\.json"):
        import_files([file])
