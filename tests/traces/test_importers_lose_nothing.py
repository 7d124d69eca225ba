"""Importers keep every token of the published data sets, and cache no tokens that no earlier turn had."""

import csv
import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import traces
from traces import TraceError
from traces.format import TraceConversation, TurnEnding, load, read
from traces.importers import IMPORTERS, detect, import_files

SAMPLES = Path(traces.__file__).parent / "samples"
SOURCES = SAMPLES / "sources"
KINDS = {
    "agents.jsonl.gz": "agents",
    "trace_0116.json.gz": "kv-cache-tester",
    "trace_0118.json.gz": "kv-cache-tester",
    "mooncake.jsonl.gz": "mooncake",
    "azure_2023_conv.csv": "azure-2023",
    "parser-1.traj": "swe-agent",
}


def rows(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(SOURCES / name, "rt") as lines:
        yield from map(json.loads, lines)


def totals(conversations: tuple[TraceConversation, ...]) -> tuple[int, int, int]:
    turns = [turn for conversation in conversations for turn in conversation.turns]
    return (
        len(turns),
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.output_tokens for turn in turns),
    )


def imported(name: str) -> tuple[TraceConversation, ...]:
    return import_files([SOURCES / name]).conversations


def test_every_sample_is_recognised_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    assert {path.name for path in SOURCES.iterdir()} == set(KINDS)
    for name, kind in KINDS.items():
        unnamed = tmp_path / "unnamed"
        unnamed.write_bytes((SOURCES / name).read_bytes())
        assert detect(unnamed).name == kind


@pytest.mark.parametrize("name", KINDS)
def test_imported_arrivals_are_sorted_and_no_turn_caches_more_than_earlier_contexts(name: str) -> None:
    found = imported(name)
    assert [c.arrival_s for c in found] == sorted(c.arrival_s for c in found)
    ids = {c.id for c in found}
    for conversation in found:
        largest = 0
        assert conversation.parent is None or conversation.parent in ids
        for index, turn in enumerate(conversation.turns):
            assert 0 <= turn.cached_tokens <= turn.prompt_tokens
            if index or conversation.parent is None:
                assert turn.cached_tokens <= largest
            largest = max(largest, turn.context_tokens)


def test_imported_condensed_conversations_keep_every_token_and_stop_reason() -> None:
    source = list(rows("agents.jsonl.gz"))
    entries = [entry for row in source for entry in row["turns"]]
    found = imported("agents.jsonl.gz")
    assert totals(found) == (len(entries), sum(e["in"] for e in entries), sum(e["out"] for e in entries))
    turns = [turn for c in found for turn in c.turns]
    assert sum(t.cached_tokens for t in turns) == sum(e["cached"] for e in entries)
    assert sum(t.ending is TurnEnding.TOOL_USE for t in turns) == sum(
        e["stop"] == "tool_use" for e in entries
    )
    for row, conversation in zip(source, found, strict=True):
        assert conversation.id == row["id"]
        gaps = [b["t"] - a["t"] for a, b in pairwise(row["turns"])]
        assert all(turn.wait_s <= gap for turn, gap in zip(conversation.turns[1:], gaps, strict=True))


@pytest.mark.parametrize("name", ["trace_0116.json.gz", "trace_0118.json.gz"])
def test_imported_recordings_keep_every_token_and_no_wait_exceeds_the_recorded_gap(name: str) -> None:
    recording = next(rows(name))
    (conversation,) = imported(name)
    requests = recording["requests"]
    assert totals((conversation,)) == (
        len(requests),
        sum(r["in"] for r in requests),
        sum(r["out"] for r in requests),
    )
    gaps = [b["t"] - a["t"] for a, b in pairwise(requests)]
    assert all(turn.wait_s <= gap for turn, gap in zip(conversation.turns[1:], gaps, strict=True))


def test_sub_agents_become_children_that_share_their_parents_prefix(tmp_path: Path) -> None:
    def request(t: float, blocks: list[int], **more: Any) -> dict[str, Any]:
        known = {"type": "n", "model": "claude-haiku", "out": 5, "stop": "tool_use", "input_types": ["text"]}
        return {"t": t, "in": len(blocks) * 64 + 10, "hash_ids": blocks, **known, **more}

    recording = {
        "id": "r",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            request(0.0, [1, 2, 3]),
            {
                "t": 4.0,
                "type": "subagent",
                "requests": [request(0.5, [1, 2, 9]), request(3.0, [1, 2, 9, 10])],
            },
            request(9.0, [1, 2, 3, 4], stop="end_turn", think_time=100.0),
            {"t": 20.0, "type": "subagent", "requests": [request(0.0, [1, 2, 3, 4, 11])]},
        ],
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps(recording))
    parent, first, second = import_files([path]).conversations
    assert [(c.id, c.parent, c.arrival_s) for c in (parent, first, second)] == [
        ("r", None, 0.0),
        ("r/1", "r", 4.5),
        ("r/2", "r", 20.0),
    ]
    assert [turn.cached_tokens for turn in first.turns] == [128, 192]
    assert [turn.cached_tokens for turn in second.turns] == [256]
    assert parent.turns[1].cached_tokens == 192
    assert parent.turns[1].wait_s == 9.0


def test_agentx_rows_are_imported_as_recordings_on_one_clock(tmp_path: Path) -> None:
    """Rows with missing or null optional fields and times on one clock, as in the published data sets."""

    def request(t: float, blocks: list[int], **more: Any) -> dict[str, Any]:
        return {
            "t": t,
            "type": "s",
            "model": "claude-opus",
            "in": 64 * len(blocks) + 7,
            "out": 5,
            **more,
            **({"hash_ids": blocks} if blocks else {}),
        }

    agent = {"t": 4.0, "type": "subagent", "agent_id": "a1", "subagent_type": "Explore", "duration_ms": None}
    entries = [
        request(0.0, [1, 2, 3], think_time=None, api_time=2.0, stop="tool_use"),
        {**agent, "requests": [request(4.5, [1, 2, 9]), request(7.0, [1, 2, 9, 10])]},
        request(9.0, [1, 2, 3, 4], think_time=1.5, ttft=0.2),
    ]
    traces = [
        {
            "id": name,
            "models": [],
            "block_size": 64,
            "hash_id_scope": "local",
            "tool_tokens": 0,
            "system_tokens": 0,
            "requests": entries,
        }
        for name in ("one", "two")
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    found = import_files([path]).conversations
    arrivals = {c.id: c.arrival_s for c in found}
    assert arrivals == {"one": 0.0, "two": 0.0, "one/1": 4.5, "two/1": 4.5}
    parent = next(c for c in found if c.id == "one")
    assert [turn.cached_tokens for turn in parent.turns] == [0, 192]
    assert [turn.wait_s for turn in parent.turns] == [0.0, 1.5]
    assert parent.turns[0].ending is TurnEnding.TOOL_USE


def test_mooncake_requests_become_conversations_by_their_hash_chains() -> None:
    source = list(rows("mooncake.jsonl.gz"))
    found = imported("mooncake.jsonl.gz")
    count, prompts, outputs = totals(found)
    assert count == len(source)
    assert prompts == sum(row["input_length"] for row in source)
    assert outputs == sum(row["output_length"] for row in source)
    assert max(len(c.turns) for c in found) > 3
    assert any(c.parent for c in found)


def test_mooncake_requests_continue_fork_or_begin_conversations_by_shared_blocks(tmp_path: Path) -> None:
    def row(at: int, tokens: int, blocks: list[int]) -> str:
        return json.dumps({"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": blocks})

    lines = [
        row(0, 1500, [0, 1, 2]),  # begins conversation A
        row(1000, 2100, [0, 1, 3, 4, 5]),  # continues A: has its two full blocks, and fills its partial block
        row(2000, 1600, [0, 1, 6, 7]),  # shares two blocks with A and then differs: a fork
        *(row(3000 + n, 600, [0, 100 + n]) for n in range(80)),  # share only the service's system prompt
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(lines))
    a, fork, *others = import_files([path]).conversations
    assert [(t.cached_tokens, t.prompt_tokens) for t in a.turns] == [(0, 1500), (1024, 2100)]
    assert a.turns[1].wait_s == 1.0
    assert (fork.parent, fork.turns[0].cached_tokens) == (a.id, 1024)
    assert len(others) == 80
    assert all(c.parent is None and c.turns[0].cached_tokens == 0 for c in others)


def test_imported_azure_requests_keep_their_lengths_and_their_spacing() -> None:
    with (SOURCES / "azure_2023_conv.csv").open() as lines:
        source = list(csv.DictReader(lines))
    found = imported("azure_2023_conv.csv")
    assert totals(found) == (
        len(source),
        sum(int(row["ContextTokens"]) for row in source),
        sum(int(row["GeneratedTokens"]) for row in source),
    )
    assert found[0].arrival_s == 0.0
    assert found[1].arrival_s == pytest.approx(50.995169 - 46.680590)


def test_swe_agent_token_counts_add_up_to_the_files_totals() -> None:
    stats = json.loads((SOURCES / "parser-1.traj").read_text())["info"]["model_stats"]
    (conversation,) = imported("parser-1.traj")
    count, prompts, outputs = totals((conversation,))
    assert count == stats["api_calls"]
    assert prompts == pytest.approx(stats["tokens_sent"], abs=count)
    assert outputs == pytest.approx(stats["tokens_received"], abs=count)
    assert [turn.ending for turn in conversation.turns] == [TurnEnding.TOOL_USE] * 3 + [
        TurnEnding.END_OF_TURN
    ]
    assert [turn.wait_s for turn in conversation.turns] == [0.0, 0.31, 1.84, 0.22]
    assert all(turn.cached_tokens > 0 for turn in conversation.turns[1:])


def test_swe_agent_history_without_queries_gives_the_same_turns(tmp_path: Path) -> None:
    run = json.loads((SOURCES / "parser-1.traj").read_text())
    for step in run["trajectory"]:
        del step["query"]
    path = tmp_path / "parser-1.traj"
    path.write_text(json.dumps(run))
    assert import_files([path]).conversations == imported("parser-1.traj")


@pytest.mark.parametrize(
    ("content", "kind", "complaint"),
    [
        ("a,b\n1,2\n", None, "none of the importers"),
        ('{"id":"a","block_size":64,"turns":[{"t":0}]}\n', None, ":1: not a condensed"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,1\n", None, ":2: invalid literal"),
        ('{"timestamp":0}\n', "mooncake", ":1: not a Mooncake request"),
        ('{"info":{},"trajectory":[]}', None, "no answer of a model"),
        ("{}", "nonsense", "no importer is called"),
    ],
)
def test_a_failed_import_reports_its_reason(
    tmp_path: Path, content: str, kind: str | None, complaint: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(TraceError, match=complaint):
        import_files([path], kind)


def test_importing_the_same_conversation_twice_is_refused() -> None:
    path = SOURCES / "parser-1.traj"
    with pytest.raises(TraceError, match="is also in"):
        import_files([path, path])


def test_importing_a_folder_reads_all_its_files_and_names_all_their_licences() -> None:
    trace = import_files([SOURCES])
    assert "Apache-2.0 + CC-BY-4.0" in trace.header.licence
    assert len(trace.conversations) == sum(len(imported(name)) for name in KINDS)


def test_shipped_traces_are_valid_and_small() -> None:
    for name in ("agents.jsonl.gz", "laptop.jsonl.gz"):
        trace = load(SAMPLES / name)
        assert trace.header.licence == "Apache-2.0"
        assert len(trace.conversations) == sum(1 for _ in read(SAMPLES / name)) > 20
    assert sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file()) < 300_000


def test_importers_are_registered_by_their_own_names() -> None:
    assert all(name == importer.name for name, importer in IMPORTERS.items())
