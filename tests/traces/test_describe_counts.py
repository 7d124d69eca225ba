"""Descriptions agree with their traces; that of an empty trace has no percentiles instead of zeros."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import traces
from traces import charts
from traces.describe import describe, spread
from traces.format import TraceConversation, TraceTurn, load
from traces.generators import bursts

pytestmark = pytest.mark.slow

SAMPLE = load(Path(traces.__file__).parent / "samples" / "agents.jsonl.gz")


def test_the_totals_of_a_trace_are_sums_over_its_turns() -> None:
    what = describe(SAMPLE.conversations)
    turns = [turn for c in SAMPLE.conversations for turn in c.turns]
    assert what.turns == len(turns) == sum(what.endings.values())
    assert what.prompt_tokens == sum(turn.prompt_tokens for turn in turns)
    assert what.appended_tokens == sum(turn.appended_tokens for turn in turns)
    assert what.cached_share == pytest.approx(sum(t.cached_tokens for t in turns) / what.prompt_tokens)
    assert what.spreads["turn_output"].count == len(turns)
    assert what.spreads["wait"].count == len(turns) - len(SAMPLE.conversations)


def test_a_description_has_the_rate_and_the_burstiness_of_arrivals() -> None:
    what = describe(bursts(20_000, rate=3.0, cv=2.0).conversations)
    assert what.rate == pytest.approx(3.0, rel=0.08)
    assert what.gap_cv == pytest.approx(2.0, rel=0.08)
    assert describe([TraceConversation(n, 0.0, (TraceTurn(1, 0, 1),)) for n in "ab"]).rate == 0.0


def test_a_description_has_the_share_of_large_appends_by_turns_conversations_and_tokens() -> None:
    def conversation(name: str, *appended: int) -> TraceConversation:
        return TraceConversation(name, 0.0, (TraceTurn(100, 0, 1), *(TraceTurn(n, 0, 1) for n in appended)))

    large = describe([conversation("a", 9000, 500, 500), conversation("b", 0 + 1)]).large_appends
    assert large.share_of_later_turns == 1 / 4
    assert large.share_of_conversations == 1 / 2
    assert large.share_of_later_tokens == 9000 / 10001


def test_an_empty_trace_has_no_percentiles() -> None:
    assert spread([]) is None
    assert describe([]).spreads == {}


def test_the_terminal_chart_of_a_trace_shows_the_licence_and_every_quantity() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(charts.terminal(SAMPLE.header, describe(SAMPLE.conversations), SAMPLE.conversations))
    text = console.export_text()
    assert "Apache-2.0" in text
    for name in ("arrivals", "first turn input", "later turn appended", "turn output", "wait"):
        assert re.search(rf"^{name}.*█", text, re.MULTILINE), name


@pytest.mark.parametrize(("name", "starts"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_the_picture_of_a_trace_is_written_and_always_the_same(
    tmp_path: Path, name: str, starts: bytes
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        charts.save(charts.picture(SAMPLE.conversations), tmp_path / folder / name)
    assert (tmp_path / "a" / name).read_bytes().startswith(starts)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
