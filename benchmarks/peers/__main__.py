"""Ours beside what people would run instead: real vLLM, the same engines and client, in turns of one run.

    python -m benchmarks.peers [--peers DIR] [--trace FILE] [--rounds 3] [--quick] [--json FILE] [--page FILE]

Ours needs nothing installed. Peers come from --peers DIR (or $CONSERVE_PEERS), an environment each, as
requirements/peers.txt says: sglang-router, vllm-router, ray-serve-llm. What is not there or does not run is
named with its reason and left out from there on. Not so ours: all conversations of a play that it does not
end count among `failed`, and it plays the next one. Every contender plays every trace once a round, started
anew for each, a trace by all before the next; each trace and round begins with another one. --quick: one
round, one trace, and nothing is started that would not end within 8 minutes.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.output import command, write_json
from benchmarks.peers import cpu, figures, page
from benchmarks.peers.contenders import Bench, DoesNotRun, PeerSetup, PlainEngines, contenders
from benchmarks.peers.figures import OURS, PeerRow
from benchmarks.peers.loads import Play, plays
from deploy.fleet import load_fleet
from deploy.small_model import make_model
from traces import ReplayError
from traces.format import TraceConversation
from traces.replay import Replay, ReplayOptions, ReplayWatcher
from traces.replay import replay as play

ROOT = Path(__file__).parents[2]
START_LIMIT_S, PLAY_LIMIT_S, WARM_LIMIT_S = 600.0, 300.0, 120.0
QUICK_START_S, QUICK_PLAY_S, QUICK_S = 240.0, 75.0, 465.0
SETTLE_S = 10.0  # between the warm-up and the play, for all alike: what a start leaves to do ends in it
LAST_TURN_S = 100.0  # of a quick run: what a contender takes, about


@dataclass
class PeerRun:
    """Rounds of contenders, and what came of them."""

    plays: Sequence[Play]
    model: str
    play_limit_s: float
    ends_at: float
    rows: list[PeerRow] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    lost: int = 0  # conversations of plays that ours did not end

    def round(self, number: int, everyone: Sequence[PeerSetup]) -> None:
        """A trace by all contenders one after another, then the next trace: the machine's speed moves by a
        fifth within half an hour, and what is compared should be minutes apart."""
        for index, one in enumerate(self.plays):
            first = (number + index) % len(everyone)
            for contender in (*everyone[first:], *everyone[:first]):
                if contender.name in self.skipped and contender.name != OURS:
                    continue
                if time.monotonic() + LAST_TURN_S > self.ends_at:
                    self.skipped[contender.name] = "a quick run had no time left for it"
                    continue
                try:
                    self._turn(number, contender, one)
                except (DoesNotRun, ReplayError, SystemExit) as reason:
                    self._did_not_end(number, contender, one, str(reason))

    def _did_not_end(self, number: int, contender: PeerSetup, one: Play, reason: str) -> None:
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
            self._warm(url)
            time.sleep(SETTLE_S)
            salt = f"{number} {contender.name} {one.name}"
            before = cpu.now()
            played = self._replayed(url, one.conversations, salt, self.play_limit_s)
            spent, others = cpu.now().since(before)
            seen = figures.row(contender.name, one.name, number, contender.peer, played, spent, others)
            self.rows.append(seen)
            print(
                f"  {one.name}: TTFET p50 {seen.ttfet_p50_s:.2f} p95 {seen.ttfet_p95_s:.2f} s, E2E p95 "
                f"{seen.e2e_p95_s:.2f} s, gap p99 {seen.gap_p99_s:.3f} s, {seen.failed} failed; "
                f"CPU {seen.cpu_s:.0f} s, others {seen.others_cpu_s:.0f} s",
                flush=True,
            )

    def _warm(self, url: str) -> None:
        """An engine's first requests are not its router's cost: a few conversations at once, unmeasured."""
        some = self.plays[0].conversations[:4]
        warm = [replace(one, arrival_s=0.0, turns=one.turns[:2]) for one in some]
        self._replayed(url, warm, f"warm {time.monotonic()}", WARM_LIMIT_S)

    def _replayed(self, url: str, trace: Sequence[TraceConversation], salt: str, limit_s: float) -> Replay:
        options = ReplayOptions(
            url, model=self.model, probes=0, time_limit_s=limit_s, request_timeout_s=limit_s, salt=salt
        )
        return asyncio.run(play(trace, options, ReplayWatcher()))


@contextmanager
def prepared(fleet_file: Path, peers: Path | None, start_limit_s: float) -> Iterator[Bench]:
    """A model made once for all, and a folder for logs that stays when something goes wrong."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        work, file = Path(folder), load_fleet(fleet_file)
        model = file.model
        if model.path == "small":
            make_model(work / "model")
            model = model.model_copy(update={"path": str(work / "model")})
        (work / "home").mkdir()
        together = sum(tier.replicas for tier in file.tiers)
        engine = file.engine.model_copy(update={"start_together": together})
        fleet = file.model_copy(update={"name": "peers", "model": model, "engine": engine})
        yield Bench(fleet, work, peers, start_limit_s)


def main() -> None:
    parser = command(__doc__, quick="one round, one trace, fewer conversations; ends within 8 minutes")
    parser.add_argument("--peers", type=Path, default=os.environ.get("CONSERVE_PEERS"))
    parser.add_argument("--trace", type=Path, help="play this one only, as it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "laptop.yaml")
    parser.add_argument("--only", default="", help="these contenders, with semicolons")
    parser.add_argument("--page", type=Path, help="write a page there, its plot in figures/ beside it")
    parser.add_argument("--provisional", default="", help="why the page's figures are not to be trusted yet")
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
            wanted = {name.strip() for name in options.only.split(";") if name.strip()}
            if unknown := wanted - {one.name for one in everyone}:
                parser.error(f"--only: no contender is called {', '.join(unknown)}")
            if wanted:
                left = [one.name for one in everyone if one.name not in wanted]
                run.skipped |= dict.fromkeys(left, "not asked for in this run (`--only`)")
                everyone = [one for one in everyone if one.name in wanted]
            for number in range(rounds):
                run.round(number, everyone)
        replicas = bench.replicas
    table, found = figures.medians(run.rows), figures.named(run.rows, run.lost)
    print(page.render(table, found, run.skipped))
    write_json(
        options.json,
        found
        | {"failures": figures.failures(table, run.lost), "left_out": run.skipped, "table": table}
        | {"rows": [asdict(one) for one in run.rows]},
    )
    if options.page:
        plot = options.page.parent / "figures" / f"{options.page.stem}.png"
        page.plot(table, plot)
        text = page.written(
            *(table, found, figures.by_round(run.rows), run.skipped, loads),
            command=_again(options.rounds, options.only, quick),
            rounds=rounds,
            engines=replicas,
            plot=str(plot.relative_to(options.page.parent)),
            provisional=options.provisional,
        )
        options.page.write_text(text)


def _again(rounds: int, only: str, quick: bool) -> str:
    """The command, without the paths of a machine."""
    asked = ['python -m benchmarks.peers --peers "$PEERS"', "--quick" if quick else f"--rounds {rounds}"]
    return " ".join([*asked, *([f'--only "{only}"'] if only else [])])


if __name__ == "__main__":
    main()
