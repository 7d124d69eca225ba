"""Plays rounds of all contenders with one model, and collects their results."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.engines import Bench, DoesNotRun
from benchmarks.harness.fleet import changed
from benchmarks.harness.rounds import rotated
from benchmarks.peers import cpu, engine_probe, figures, profile
from benchmarks.peers.capacity import PeerCapacity, capacity, saturated
from benchmarks.peers.contenders import PeerSetup, Serving
from benchmarks.peers.figures import OURS, PeerRow
from benchmarks.peers.loads import PeerTrace, Play
from benchmarks.peers.profile import EngineProfileRow, IterationCost
from deploy.fleet import load_fleet
from deploy.small_model import make_model
from traces import ReplayError
from traces.format import TraceConversation
from traces.replay import Replay, ReplayOptions, ReplayWatcher, replay

WARM_LIMIT_S = 120.0
SETTLE_S = 10.0  # before each play, so that work of a start or of the previous play ends
WARM_CONVERSATIONS, WARM_TURNS = 4, 2


@dataclass
class PeerRun:
    """One run of the benchmark: its traces and loads, and the results of all plays."""

    traces: Sequence[PeerTrace]
    loads: Sequence[float]
    model: str
    play_limit_s: float
    ends_at: float = float("inf")
    plays: list[list[Play]] = field(default_factory=list)  # of each trace, one for each load
    capacities: list[PeerCapacity] = field(default_factory=list)
    rows: list[PeerRow] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    lost: int = 0  # conversations in plays that our fleet did not finish
    probe: Path | None = None  # where engines write what they do; None: they are not profiled
    profiles: list[EngineProfileRow] = field(default_factory=list)
    costs: dict[str, IterationCost] = field(default_factory=dict)  # by contender

    def measure_capacity(self, routers: Sequence[PeerSetup]) -> dict[str, str]:
        """Let each router serve all conversations of each trace at once; return each trace's best router.

        The best router serves the most tokens per second. Loads are shares of its rate of conversations.
        """
        found: list[list[PeerCapacity]] = []
        for router in routers:
            try:
                found.append(list(self._capacities_of(router)))
            except (DoesNotRun, ReplayError) as reason:
                self._leave_out(router.name, str(reason))
        if not found:
            raise SystemExit("no router runs over plain vLLM: install one as requirements/peers.txt says")
        self.capacities = [one for ones in found for one in ones]
        best = [max(ones, key=lambda one: one.tokens_per_s) for ones in zip(*found, strict=True)]
        self.plays = [
            [trace.at(load, one.conversations_per_s) for load in self.loads]
            for trace, one in zip(self.traces, best, strict=True)
        ]
        return {one.trace: one.router for one in best}

    def _capacities_of(self, router: PeerSetup) -> Iterator[PeerCapacity]:
        with router.start() as serving:
            self.warm_up(serving)
            for trace in self.traces:
                salt = f"capacity {router.name} {trace.name}"
                played = self._replayed(serving, trace.at_once(), salt, self.play_limit_s)
                found = capacity(trace.name, router.name, played)
                print(
                    f"capacity of plain vLLM behind {router.name}, {trace.name}: {found.tokens_per_s:.0f} "
                    f"tokens/s, {found.conversations_per_s:.3f} conversations/s",
                    flush=True,
                )
                yield found

    def round(self, number: int, everyone: Sequence[PeerSetup]) -> None:
        """Play one round: for each trace, each contender in turn plays all loads."""
        for index, plays in enumerate(self.plays):
            for contender in rotated(everyone, number + index):
                if contender.name in self.skipped and contender.name != OURS:
                    continue
                left = list(plays)
                try:
                    self._turn(number, contender, left)
                except (DoesNotRun, ReplayError, SystemExit) as reason:
                    if contender.name == OURS:
                        self.lost += sum(len(one.conversations) for one in left)
                    at = left[0].name if left else plays[-1].name
                    self._leave_out(contender.name, f"round {number}, {at}: {reason}")

    def _leave_out(self, contender: str, reason: str) -> None:
        self.skipped[contender] = reason
        print(f"{contender} is left out: {reason}", flush=True)

    def _turn(self, number: int, contender: PeerSetup, left: list[Play]) -> None:
        """Start a contender and replay the plays in `left` against it; remove each play that ends."""
        began = time.monotonic()
        with contender.start() as serving:
            took = time.monotonic() - began
            print(f"round {number}: {contender.name} serves after {took:.0f} s", flush=True)
            self.warm_up(serving)
            while left:
                if time.monotonic() + SETTLE_S + self.play_limit_s > self.ends_at:
                    self._leave_out(contender.name, f"a quick run had no time left for {left[0].name}")
                    return
                time.sleep(SETTLE_S)
                self.play(number, contender, serving, left[0])
                del left[0]

    def warm_up(self, serving: Serving) -> None:
        """Play the beginnings of a few conversations, because an engine's first requests are the slowest."""
        some = self.traces[0].at_once()[:WARM_CONVERSATIONS]
        warm = [replace(one, turns=one.turns[:WARM_TURNS]) for one in some]
        self._replayed(serving, warm, f"warm {time.monotonic()}", WARM_LIMIT_S)

    def play(self, number: int, contender: PeerSetup, serving: Serving, one: Play) -> None:
        bound, before = serving.first_turns(), cpu.now()
        salt = f"{number} {contender.name} {one.name}"
        played = self._replayed(serving, one.conversations, salt, self.play_limit_s)
        if self.probe is not None:
            self._profile(contender.name, serving, one, time.monotonic() - played.duration_s, played)
        spent, others = cpu.now().since(before)
        now = serving.first_turns()
        counts = now.since(bound) if now and bound else None
        row = figures.row(contender.name, one, number, contender.peer, played, spent, others, counts)
        self.rows.append(row)
        print(
            f"  {one.name}: TTFET p50 {row.ttfet_p50_s:.2f} p95 {row.ttfet_p95_s:.2f} s, E2E p95 "
            f"{row.e2e_p95_s:.2f} s, gap p99 {row.gap_p99_s:.3f} s, {row.tokens_per_s:.0f} tokens/s, "
            f"{row.failed} failed; CPU {row.cpu_s:.0f} s, others {row.others_cpu_s:.0f} s",
            flush=True,
        )

    def _profile(self, contender: str, serving: Serving, one: Play, began: float, played: Replay) -> None:
        """Record a profile of each engine, from the first arrival until most of the play is served."""
        assert self.probe is not None
        found = {
            engine: profile.events(self.probe, pids)
            for engine, pids in profile.processes_of(serving.engines).items()
        }
        _, until_s = saturated(played)
        for engine, events in sorted(found.items()):
            row = profile.row(contender, one.name, engine, events, began, began + until_s)
            self.profiles.append(row)
        self.costs[contender] = profile.cost(found.values())

    def _replayed(
        self, serving: Serving, trace: Sequence[TraceConversation], salt: str, limit_s: float
    ) -> Replay:
        options = ReplayOptions(
            serving.url,
            model=self.model,
            probes=0,
            time_limit_s=limit_s,
            request_timeout_s=limit_s,
            salt=salt,
        )
        return asyncio.run(replay(trace, options, ReplayWatcher()))


@contextmanager
def prepared(
    fleet_file: Path, peers: Path | None, start_limit_s: float, probed: bool = False
) -> Iterator[Bench]:
    """Make one model for all contenders, and a folder for their logs.

    With `probed`, all engines log what they spend their time on.
    """
    with TemporaryDirectory(prefix="peers-") as folder:
        work, fleet = Path(folder), load_fleet(fleet_file)
        if fleet.model.path == "small":
            make_model(work / "model")
            fleet = changed(fleet, model={"path": str(work / "model")})
        (work / "home").mkdir()
        engine: dict[str, object] = {"start_together": sum(tier.replicas for tier in fleet.tiers)}
        if probed:
            engine["env"] = dict(engine_probe.plugin_folder(work))
        yield Bench(changed(fleet, name="peers", engine=engine), work, peers, start_limit_s)
