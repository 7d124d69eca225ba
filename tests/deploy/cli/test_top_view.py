"""`conserve top` draws the state that the gateway's dashboard shows."""

from typing import Any

from rich.console import Console

from deploy.cli.commands.top import NOTHING, SPANS, TIMELINE, WINDOW_S, cells, kv_bar, render


def engine(**changes: Any) -> dict[str, Any]:
    kv = {"capacity": 1000, "live": 400, "reserved": 100, "parked": 7000, "offline": 200}
    kv |= {"host_used": 250, "host_capacity": 1000}
    return {
        "engine": "decode-0",
        "tier": "decode",
        "role": "decode",
        "epoch": 3,
        "status": "up",
        "running": 2,
        "waiting": 1,
        "offline_running": 5,
        "kv": kv,
    } | changes


def state(**changes: Any) -> dict[str, Any]:
    timeline = {
        "key": "ab12:agent-7",
        "engine": "decode-0",
        "started": 50.0,
        "turns": 4,
        "ended": None,
        "spans": [["prefill", 50.0], ["decode", 60.0], ["tool", 90.0]],
    }
    return {
        "fleet": "laptop",
        "notice": "",
        "now": 120.0,
        "live": 11,
        "turns_running": 2,
        "decoder_kv": 0.5,
        "slo": [{"objective": "ttfet", "target_s": 30.0, "attained": 0.995, "answers": 200}],
        "engines": [engine()],
        "timelines": [timeline],
    } | changes


def text_of(shown: dict[str, Any]) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(shown, timelines=5))
    return console.export_text()


def test_conserve_top_names_engines_conversations_and_targets() -> None:
    text = text_of(state())
    for expected in (
        "laptop",
        "11 conversations",
        "50%",
        "99.5% begin within 30 s",
        "7000",
        "25%",
        "agent-7",
        "4 turns",
    ):
        assert expected in text


def test_conserve_top_shows_the_state_of_an_engine_that_is_not_up() -> None:
    assert "draining" in text_of(state(engines=[engine(status="draining")]))


def test_the_kv_bar_shows_shares_of_the_capacity_and_never_exceeds_its_width() -> None:
    bar = kv_bar({"capacity": 1000, "live": 500, "reserved": 250, "offline": 0})
    assert bar.plain.count("█") == 15 + 8 and len(bar.plain) == 30
    assert len(kv_bar({"capacity": 10, "live": 40, "reserved": 40, "offline": 40}).plain) == 30
    assert kv_bar({"capacity": 0, "live": 0, "reserved": 0, "offline": 0}).plain.count("█") == 0


def test_a_timeline_shows_each_span_at_its_time() -> None:
    row = cells([["prefill", 60.0], ["decode", 90.0]], now=WINDOW_S)
    assert len(row) == TIMELINE
    assert row[TIMELINE // 4] == NOTHING
    assert row[TIMELINE * 5 // 8] == SPANS["prefill"]
    assert row[-1] == SPANS["decode"]


def test_every_kind_of_span_has_a_glyph_of_its_own() -> None:
    assert len({glyph for glyph, _ in (*SPANS.values(), NOTHING)}) == len(SPANS) + 1
    assert "·" * 10 in text_of(state())


def test_conserve_top_sorts_conversations_by_their_start_newest_first() -> None:
    older = state()["timelines"][0]
    newer = older | {"key": "ab12:agent-9", "started": 70.0}
    for order in ([older, newer], [newer, older]):
        text = text_of(state(timelines=order))
        assert text.index("agent-9") < text.index("agent-7")


def test_conserve_top_without_conversations_says_so() -> None:
    assert "no conversation" in text_of(state(timelines=[]))
