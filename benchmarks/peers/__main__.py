"""Our fleets beside other routers over real vLLM, with the same engines and client, in turns of one run.

    python -m benchmarks.peers [--peers DIR] [--trace FILE] [--rounds 3] [--quick] [--json FILE]

Peers come from --peers DIR (or $CONSERVE_PEERS), an environment each, as requirements/peers.txt says. A peer
that is not installed or does not run is named with its reason and left out from then on. When ours does not
end a play, all its conversations count as `failed`, and ours plays the next trace. Every contender plays
every trace once a round, started anew for each; each trace and round begins with another contender. --quick
is one round of one trace, and nothing starts that would not end within 8 minutes.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.harness.engines import Bench, DoesNotRun, PlainEngines
from benchmarks.harness.fleet import RANDOM, changed
from benchmarks.harness.output import command, named_rows, print_rows, report
from benchmarks.harness.rounds import rotated
from benchmarks.peers import cpu, figures
from benchmarks.peers.contenders import PeerSetup, contenders
from benchmarks.peers.figures import OURS, PeerRow
from benchmarks.peers.loads import Play, plays
from deploy.fleet import load_fleet
from deploy.small_model import make_model
from traces import ReplayError
from traces.format import TraceConversation
from traces.replay import Replay, ReplayOptions, ReplayWatcher, replay

START_LIMIT_S, PLAY_LIMIT_S, WARM_LIMIT_S = 600.0, 300.0, 120.0
QUICK_START_S, QUICK_PLAY_S, QUICK_S = 240.0, 75.0, 465.0
SETTLE_S = 10.0  # between the warm-up and the play: work that a start leaves ends in it
LAST_TURN_S = 100.0  # about what a contender takes in a quick run


@dataclass
class PeerRun:
    """Rounds of all contenders, and their results."""

    plays: Sequence[Play]
    model: str
    play_limit_s: float
    ends_at: float
    rows: list[PeerRow] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    lost: int = 0  # conversations of plays that ours did not end

    def round(self, number: int, everyone: Sequence[PeerSetup]) -> None:
        """Let all contenders play one trace, then the next, so that compared plays are only minutes apart."""
        for index, one in enumerate(self.plays):
            for contender in rotated(everyone, number + index):
                if contender.name in self.skipped and contender.name != OURS:
                    continue
                if time.monotonic() + LAST_TURN_S > self.ends_at:
                    self.skipped[contender.name] = "a quick run had no time left for it"
                    continue
                try:
                    self._turn(number, contender, one)
                except (DoesNotRun, ReplayError, SystemExit) as reason:
                    self._skip(number, contender, one, str(reason))

    def _skip(self, number: int, contender: PeerSetup, one: Play, reason: str) -> None:
        if contender.name == OURS:
            self.lost += len(one.conversations)
            reason = f"round {number}, {one.name}: {reason}"
        self.skipped[contender.name] = reason
        print(f"{contender.name} is left out: {reason}", flush=True)

    def _turn(self, number: int, contender: PeerSetup, one: Play) -> None:
        began = time.monotonic()
        with contender.start() as url:
            took = time.monotonic() - began
            print(f"round {number}: {contender.name} serves after {took:.0f} s", flush=True)
            # The first requests of an engine are not its router's cost: a few conversations go unmeasured.
            warm = [
                replace(some, arrival_s=0.0, turns=some.turns[:2]) for some in self.plays[0].conversations[:4]
            ]
            self._replayed(url, warm, f"warm {time.monotonic()}", WARM_LIMIT_S)
            time.sleep(SETTLE_S)
            salt = f"{number} {contender.name} {one.name}"
            before = cpu.now()
            played = self._replayed(url, one.conversations, salt, self.play_limit_s)
            spent, others = cpu.now().since(before)
        row = figures.row(contender.name, one.name, number, contender.peer, played, spent, others)
        self.rows.append(row)
        print(
            f"  {one.name}: TTFET p50 {row.ttfet_p50_s:.2f} p95 {row.ttfet_p95_s:.2f} s, E2E p95 "
            f"{row.e2e_p95_s:.2f} s, gap p99 {row.gap_p99_s:.3f} s, {row.failed} failed; "
            f"CPU {row.cpu_s:.0f} s, others {row.others_cpu_s:.0f} s",
            flush=True,
        )

    def _replayed(self, url: str, trace: Sequence[TraceConversation], salt: str, limit_s: float) -> Replay:
        options = ReplayOptions(
            url, model=self.model, probes=0, time_limit_s=limit_s, request_timeout_s=limit_s, salt=salt
        )
        return asyncio.run(replay(trace, options, ReplayWatcher()))


@contextmanager
def prepared(fleet_file: Path, peers: Path | None, start_limit_s: float) -> Iterator[Bench]:
    """Make one model for all contenders, and a folder for their logs."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        work, fleet = Path(folder), load_fleet(fleet_file)
        if fleet.model.path == "small":
            make_model(work / "model")
            fleet = changed(fleet, model={"path": str(work / "model")})
        (work / "home").mkdir()
        together = sum(tier.replicas for tier in fleet.tiers)
        yield Bench(
            changed(fleet, name="peers", engine={"start_together": together}), work, peers, start_limit_s
        )


def main() -> None:
    quick = "one round, one trace, fewer conversations; ends within 8 minutes"
    parser = command(__doc__, quick, RANDOM)
    parser.add_argument("--peers", type=Path, default=os.environ.get("CONSERVE_PEERS"))
    parser.add_argument("--trace", type=Path, help="play this one only, as it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only these contenders, separated by semicolons")
    options = parser.parse_args()
    cpu.mark()
    quick, rounds = options.quick, 1 if options.quick else options.rounds
    ends_at = time.monotonic() + (QUICK_S if quick else float("inf"))
    loads = plays(options.trace, quick)
    peers = Path(options.peers) if options.peers else None
    with prepared(options.fleet, peers, QUICK_START_S if quick else START_LIMIT_S) as bench:
        run = PeerRun(loads, bench.fleet.model.name, QUICK_PLAY_S if quick else PLAY_LIMIT_S, ends_at)
        with PlainEngines(bench) as plain:
            everyone = contenders(bench, plain)
            names = [one.name for one in everyone]
            wanted = [name.strip() for name in options.only.split(";") if name.strip()] or names
            if unknown := set(wanted) - set(names):
                parser.error(
                    f"--only: no contender is called {', '.join(unknown)}; there are {'; '.join(names)}"
                )
            for name in names:
                if name not in wanted:
                    run.skipped[name] = "not asked for in this run (`--only`)"
            for number in range(rounds):
                run.round(number, [one for one in everyone if one.name in wanted])
    table, found = figures.medians(run.rows), figures.named(run.rows, run.lost)
    for trace, rows in table.items():
        print_rows(trace, named_rows("contender", rows))
    print("\n".join(f"left out: {name}: {why}" for name, why in run.skipped.items()))
    failures = figures.failures(table, run.lost)
    report(options.json, found, failures=failures, left_out=run.skipped, table=table, rows=run.rows)


if __name__ == "__main__":
    main()
