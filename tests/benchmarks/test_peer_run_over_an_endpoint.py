"""A run of `benchmarks.peers`, from the capacity to the JSON file, over an endpoint that computes nothing."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from benchmarks.harness.engines import Bench
from benchmarks.peers import __main__ as peers
from benchmarks.peers import peer_run
from benchmarks.peers.contenders import FirstTurnCounts, PeerSetup, Serving
from deploy.fleet import load_fleet
from tests.traces.replay.engine import PlayedEngine
from traces import format as trace_format
from traces.format import TraceConversation, TraceHeader, TraceTurn

RANDOM = Path(__file__).parents[2] / "configs" / "random.yaml"


@contextmanager
def endpoint(**timing: float) -> Iterator[PlayedEngine]:
    engine, ready, ended = PlayedEngine(**timing), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with engine.running():
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10.0)
    try:
        yield engine
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10.0)
        loop.close()


def test_a_run_of_the_peers_benchmark_writes_figures_for_every_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = (TraceTurn(200, 0, 8), TraceTurn(60, 208, 8, 0.01))
    trace = tmp_path / "two.jsonl"
    found = (TraceConversation(f"c{number}", float(number), turns) for number in range(4))
    trace_format.write(trace, found, TraceHeader())
    with endpoint() as fast, endpoint(fixed_s=0.04, step_s=0.02) as slow:
        counts = itertools.count()

        def first_turns(self: Serving) -> FirstTurnCounts | None:
            looks = 2.0 * next(counts)
            return FirstTurnCounts(looks, looks / 2, looks) if self.directory else None

        monkeypatch.setattr(Serving, "first_turns", first_turns)
        setups = [
            PeerSetup("ours", lambda: nullcontext(Serving(fast.url, {}, fast.url)), peer=False),
            PeerSetup(
                "ours, roles: elastic", lambda: nullcontext(Serving(slow.url, {}, slow.url)), peer=False
            ),
            PeerSetup("slow", lambda: nullcontext(Serving(slow.url, {})), over_plain=True),
            PeerSetup("fast", lambda: nullcontext(Serving(fast.url, {})), over_plain=True),
        ]
        bench = Bench(load_fleet(RANDOM), tmp_path, None, 1.0)
        monkeypatch.setattr(peers, "contenders", lambda bench, plain: setups)
        monkeypatch.setattr(peers, "prepared", lambda *_: nullcontext(bench))
        monkeypatch.setattr(peer_run, "SETTLE_S", 0.0)
        out = tmp_path / "out.json"
        arguments = ["--traces", str(trace), "--loads", "0.5,2.0", "--rounds", "1", "--json", str(out)]
        monkeypatch.setattr(
            "sys.argv", ["peers", *arguments, "--only", "ours;ours, roles: elastic;slow;fast"]
        )
        peers.main()
    written = json.loads(out.read_text())
    assert written["best_routers"] == {"two": "fast"}
    assert len(written["rows"]) == 4 * 2 and written["failed"] == 0
    assert list(written["table"]) == ["two at 0.5", "two at 2"]
    assert list(written["by_play"]["tokens_per_s_vs_best_peer"]) == ["two at 2"]
    assert 0.3 < written["ttfet_p50_vs_best_peer"] < 3.0, "the same endpoint as the best router's"
    assert written["variants"]["ours, roles: elastic"]["ttfet_p50_vs_best_peer"] > 1.5
    assert written["least_kv_share"] == 1.0
    capacities = {one["router"]: one["conversations_per_s"] for one in written["capacity"]}
    assert capacities["fast"] > capacities["slow"]
