"""A report shows measurements side by side in one page without external resources."""

import io
import re
from dataclasses import replace

from rich.console import Console

from traces.format import TurnEnding
from traces.replay.results import (
    ConversationResult,
    MeterReading,
    PlayOutcome,
    Replay,
    TurnResult,
    Unloaded,
    summarise,
)
from traces.report import in_flight_over_time, page, tables, terminal, tokens_over_time

ALONE = Unloaded(0.1, 0.0, 0.0, 0.01, 0.0, probes=3, ttft_error=0.02, tbt_error=0.01)


def turn(asked: float, ttft: float, tbt: float, wait: float = 0.0) -> TurnResult:
    answered = asked + ttft + 10 * tbt
    return TurnResult(TurnEnding.END_OF_TURN, wait, asked, ttft, answered, 100, 100, 11, 0, tbt, 0)


def run(label: str, ttft: float, tbt: float = 0.02, error: str = "") -> Replay:
    done = [
        ConversationResult(f"c{n}", float(n), float(n), PlayOutcome.DONE, 0, (turn(float(n), ttft, tbt),))
        for n in range(20)
    ]
    broken = ConversationResult("x", 1.0, 1.0, PlayOutcome.FAILED, 0, (), error=f"turn 1: {error}")
    return Replay(
        label=label,
        trace="a.jsonl",
        url="http://127.0.0.1:1",
        model="m",
        options={"dialect": "vllm"},
        duration_s=25.0,
        chars_per_token=4.0,
        calibrated_by="tokenize",
        slo_factor=5.0,
        unloaded=ALONE,
        meters=MeterReading({"conserve_transfers_total": 20.0, "vllm:x_total": 3.0}, None, ("u: HTTP 404",)),
        conversations=(*done, broken) if error else tuple(done),
    )


def cells(runs: list[Replay], row: str) -> list[str]:
    for table in tables(runs):
        for name, *found in table.rows:
            if name == row:
                return found
    raise AssertionError(f"no row {row!r}")


def test_the_report_page_has_no_external_references() -> None:
    html = page([run("one", 0.2), run("two", 0.4)])
    assert html.count("<svg") == 2
    addresses = set(re.findall(r"""(?:href|src|url)\s*[=(]\s*["']?([^"'\s)>]+)""", html))
    assert all(address.startswith("#") for address in addresses)
    assert "<script" not in html
    assert "@import" not in html
    assert "<link" not in html


def test_a_report_shows_two_runs_side_by_side_with_the_change_of_each_figure() -> None:
    runs = [run("one", 0.2), run("two", 0.3)]
    assert cells(runs, "TTFET, p95") == ["200 ms", "300 ms", "+50.0%"]
    assert cells(runs, "last-turn TBT, p50") == ["20 ms", "20 ms", "+0.0%"]


def test_latencies_above_five_times_the_unloaded_latency_are_violations() -> None:
    runs = [run("calm", 0.49), run("late", 0.51)]
    assert cells(runs, "TTFET: violations") == ["0.0%", "100.0%"]
    assert cells(runs, "TTFET: geometric mean of measured / unloaded") == ["4.90 x", "5.10 x"]


def test_a_report_shows_errors_counters_and_pages_that_could_not_be_read() -> None:
    broken = run("one", 0.2, error="HTTP 500: <b>no</b>")
    assert cells([broken], "HTTP 500: <b>no</b>") == ["1"]
    assert cells([broken], "failed") == ["1"]
    assert cells([broken], "conserve_transfers_total") == ["20"]
    html = page([broken])
    assert "Not read: u: HTTP 404" in html
    assert "HTTP 500: &lt;b&gt;no&lt;/b&gt;" in html
    assert "<b>no</b>" not in html


def test_a_report_shows_missing_conversations_next_to_the_percentiles() -> None:
    note = "one: 1 of 21 conversations not done"
    assert note in tables([run("one", 0.2, error="HTTP 500: no")])[0].note
    assert note not in tables([run("one", 0.2)])[0].note


def test_labels_of_runs_are_escaped_in_the_report_page() -> None:
    html = page([run("<script>alert(1)</script> $x_1$", 0.2), run("_two", 0.2)])
    assert "<script" not in html
    assert "$x_1$" in html


def test_the_same_runs_give_the_same_report_page() -> None:
    assert page([run("one", 0.2)]) == page([run("one", 0.2)])


def test_a_report_in_the_terminal_shows_the_same_numbers_as_the_page() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal([run("one", 0.2), run("two", 0.3)]))
    text = console.export_text()
    assert re.search(r"TTFET, p95\s+200 ms\s+300 ms\s+\+50\.0%", text)
    assert "Violated above 5 times" in text


def test_a_run_without_any_answer_can_still_be_reported() -> None:
    nothing = replace(run("none", 0.2), conversations=(), unloaded=None, meters=MeterReading())
    assert "Latencies" not in page([nothing])
    assert summarise(nothing).objectives == {}


def test_charts_over_time_count_every_conversation_and_token() -> None:
    played = run("one", 0.2)
    _, live = in_flight_over_time(played)
    assert live[-1] == 0.0
    assert min(live) >= 0.0
    times, rates = tokens_over_time(played)
    width = times[1] - times[0]
    assert abs(sum(rate * width for rate in rates) - 20 * 11) < 1e-6
