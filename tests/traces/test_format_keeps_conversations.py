"""A trace is read back unchanged, and an invalid file is refused with its name and line."""

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import TraceError
from traces.format import (
    TraceConversation,
    TraceHeader,
    TraceTurn,
    TurnEnding,
    from_json,
    load,
    read,
    to_json,
    write,
)

SECONDS = st.integers(0, 10**9).map(lambda micros: micros / 1e6)
TOKENS = st.integers(0, 10**6)


@st.composite
def conversations(draw: st.DrawFn) -> TraceConversation:
    turns: list[TraceTurn] = []
    largest = 0
    parent = draw(st.none() | st.just("parent"))
    for number in range(draw(st.integers(1, 5))):
        cached = draw(st.integers(0, largest) if number or parent is None else TOKENS)
        appended = draw(st.integers(0 if cached else 1, 10**6))
        turn = TraceTurn(
            appended_tokens=appended,
            cached_tokens=cached,
            output_tokens=draw(TOKENS),
            wait_s=draw(SECONDS),
            ending=draw(st.sampled_from(TurnEnding)),
            served_s=draw(st.none() | SECONDS),
        )
        largest = max(largest, turn.context_tokens)
        turns.append(turn)
    return TraceConversation(
        id=draw(st.text(min_size=1, max_size=8).filter(lambda name: name != "parent")),
        arrival_s=draw(SECONDS),
        turns=tuple(turns),
        parent=parent,
        model_class=draw(st.sampled_from(["", "opus"])),
    )


@given(conversations())
def test_a_conversation_written_as_a_line_is_read_back_unchanged(conversation: TraceConversation) -> None:
    assert from_json(to_json(conversation)) == conversation


@settings(max_examples=25, deadline=None)
@given(st.lists(conversations(), max_size=4, unique_by=lambda c: c.id), st.booleans())
def test_a_trace_file_is_read_back_unchanged_and_its_bytes_depend_only_on_its_content(
    tmp_path_factory: pytest.TempPathFactory, found: list[TraceConversation], zipped: bool
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    ordered = sorted(found, key=lambda c: c.arrival_s)
    suffix = ".jsonl.gz" if zipped else ".jsonl"
    one, two = folder / f"one{suffix}", folder / f"two{suffix}"
    header = TraceHeader(source="here", licence="CC-BY-4.0", attribution="us", notes="n")
    assert write(one, ordered, header) == write(two, ordered, header) == len(ordered)
    assert one.read_bytes() == two.read_bytes()
    assert load(one).header == header
    assert load(one).conversations == tuple(ordered)


GOOD = {"id": "a", "arrival": 1.0, "turns": [{"appended": 5, "cached": 0, "out": 2, "end": "tool_use"}]}


def turn(**changes: object) -> dict[str, object]:
    return {**GOOD, "turns": [{**GOOD["turns"][0], **changes}]}  # type: ignore[index]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        ({"id": "a", "arrival": 0.0}, "missing required field `turns`"),
        ({**GOOD, "turns": []}, "no turns"),
        ({**GOOD, "arrival": "soon"}, r"Expected `float`, got `str` - at `\$.arrival`"),
        ({**GOOD, "arrival": -1.0}, "not a time"),
        ({**GOOD, "arrival": 0.5}, "arrives before"),
        ({**GOOD, "id": "first"}, "appears twice"),
        ({**GOOD, "parent": "a"}, "its own parent"),
        (turn(appended=True), r"Expected `int`, got `bool` - at `\$.turns\[0\].appended`"),
        (turn(appended=-1), "negative"),
        (turn(appended=0), "prompt is empty"),
        (turn(cached=3), "no parent"),
        (turn(end="stop"), "Invalid enum value 'stop'"),
        (turn(wait=-2), "not a duration"),
        (
            {**GOOD, "turns": [*GOOD["turns"], {**GOOD["turns"][0], "cached": 8}]},
            "but no earlier turn left above 7",
        ),  # type: ignore[misc, index, dict-item]
    ],
)
def test_a_wrong_line_is_refused_with_its_file_and_line_number(
    tmp_path: Path, row: object, complaint: str
) -> None:
    path = tmp_path / "t.jsonl"
    first = {**GOOD, "id": "first"}
    line = row if isinstance(row, bytes) else orjson.dumps(row)
    path.write_bytes(b"\n".join([b'{"format":"conserve-trace/1"}', orjson.dumps(first), b"", line]))
    with pytest.raises(TraceError, match=complaint) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path}:4: ")


def test_a_file_of_another_format_is_refused_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl:1: not a conserve trace.*conserve trace import"):
        list(read(path))


def test_a_cut_off_gzip_is_an_error_and_not_a_short_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    write(path, [TraceConversation("a", 0.0, (TraceTurn(5, 0, 2),))], TraceHeader())
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        list(read(path))


def test_writing_a_trace_refuses_conversations_out_of_order(tmp_path: Path) -> None:
    later, sooner = (
        TraceConversation(name, at, (TraceTurn(5, 0, 2),)) for name, at in (("a", 2.0), ("b", 1.0))
    )
    with pytest.raises(TraceError, match="sort first"):
        write(tmp_path / "t.jsonl", [later, sooner], TraceHeader())


def test_the_effective_turn_is_the_first_that_speaks_to_the_user() -> None:
    tool, said = TraceTurn(5, 0, 2, ending=TurnEnding.TOOL_USE), TraceTurn(1, 7, 2)
    assert TraceConversation("a", 0.0, (tool, said, tool, said)).effective_turn == 1
    assert TraceConversation("a", 0.0, (tool, tool)).effective_turn == 1
