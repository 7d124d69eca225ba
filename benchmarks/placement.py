"""Cost of a placement decision on a full fleet, and placements per second that reach the journal.

    python -m benchmarks.placement [--quick] [--json FILE]
    python -m benchmarks.placement --journal [--quick] [--json FILE]

The product's placer and binding table run while engines report. For every conversation that is placed, the
oldest conversation ends.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, perf_counter_ns

import numpy as np

from benchmarks.harness.output import command, write_json
from placement.engines import EngineInfo, EngineState, Role
from placement.routing.bindings import Binding, Bindings
from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import PlacerSettings
from placement.routing.receipts import Placement
from placement.scheduling.prefill_curve import PrefillCurve
from router.directory.conversations import ConversationRecord
from router.directory.journal import Journal, JournalError
from router.directory.journal_records import node, placed, turn_ended
from router.identity.prefix_chain import End

KV_TOKENS = 4_000_000
REPORTS_PER_DECISION = 10
PERCENTILES = (50, 90, 99, 99.9)
JOURNAL_RATES = (1_000, 3_000, 0)  # 0: all at once


@dataclass(frozen=True)
class FleetSize:
    """Size of the fleet, and number of measured decisions."""

    decoders: int
    prefillers: int
    conversations: int
    decisions: int


class PlacedFleet:
    """A placer and binding table with a constant number of conversations, whose engines report."""

    def __init__(self, size: FleetSize) -> None:
        self.random = random.Random(1)
        self.now = 0.0
        self.seq = 0
        self.decoders = [f"decode-{i}" for i in range(size.decoders)]
        self.placer = Placer(PlacerSettings(max_prefill_wait_s=1e9), {"t": PrefillCurve(0.02, 4e-5, 2e-10)})
        self.bindings = Bindings()
        prefillers = [f"prefill-{i}" for i in range(size.prefillers)]
        for name in (*prefillers, *self.decoders):
            role = Role.PREFILL if name.startswith("prefill") else Role.DECODE
            self.placer.engine_up(EngineInfo(name, "t", role, 1, "", "", "", KV_TOKENS, 16, 1 << 20))
        self.live = dict.fromkeys(self.decoders, 0)
        self.held: dict[str, tuple[str, int]] = {}
        self.unconfirmed: dict[str, list[str]] = {name: [] for name in self.decoders}
        for i in range(size.conversations):
            self.bind(f"key:{i}")
            self.report(self.random.choice(self.decoders))

    def bind(self, key: str) -> float:
        """Place and bind one conversation; return how many microseconds that took."""
        self.now += 0.001
        turn = FirstTurn(key, self.random.randrange(1_000, 40_000))
        began = perf_counter_ns()
        placed = self.placer.place(turn, self.now)
        assert isinstance(placed, Placement), placed
        self.bindings.bind(key, placed.decoder, 1, self.now)
        took = (perf_counter_ns() - began) / 1000
        self.placer.prefill_done(key, self.now)
        self.unconfirmed[placed.decoder].append(key)
        self.held[key] = (placed.decoder, turn.prompt_tokens)
        self.live[placed.decoder] += turn.prompt_tokens
        return took

    def end(self, key: str) -> None:
        engine, tokens = self.held.pop(key)
        self.bindings.end(key)
        self.placer.release(key, self.now)
        self.live[engine] -= tokens

    def report(self, engine: str) -> None:
        """Report an engine's state to the placer."""
        self.seq += 1
        confirmed, self.unconfirmed[engine] = dict.fromkeys(self.unconfirmed[engine], self.seq), []
        state = EngineState(engine, 1, self.seq, self.live[engine], 0, 0, 0, 1, 0, confirmed=confirmed)
        self.placer.observe(state, self.now)


def measure(size: FleetSize) -> dict[str, dict[str, float]]:
    """Return percentiles of the time that a decision takes, for a first turn and for a later turn."""
    fleet = PlacedFleet(size)
    first: list[float] = []
    later: list[float] = []
    for i in range(size.decisions):
        for _ in range(REPORTS_PER_DECISION):
            fleet.report(fleet.random.choice(fleet.decoders))
        fleet.end(f"key:{i}")
        first.append(fleet.bind(f"key:{size.conversations + i}"))
        for _ in range(REPORTS_PER_DECISION):
            key = f"key:{fleet.random.randrange(i + 1, size.conversations + i)}"
            began = perf_counter_ns()
            found = fleet.bindings.look_up(key)
            later.append((perf_counter_ns() - began) / 1000)
            assert found is not None
    return {"first turn: place and bind": percentiles(first), "later turn: look up": percentiles(later)}


async def measure_journal(rate: float, placements: int) -> dict[str, float]:
    """Offer `rate` placements per second; return how many reach the disk each second, and how long they take.

    As in a fleet, placements are refused while the disk does not answer.
    """
    record = ConversationRecord("", None, 0.0, 0.0, notes=[{"receipt": "x" * 700}])
    took: list[float] = []
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")

        async def place(number: int) -> None:
            began = perf_counter_ns()
            record.key = f"key:{number}"
            for row in placed(record, Binding(record.key, "decode-0", 1, 0.0)):
                journal.append(row)
            journal.append(node(record.key, 0.0, End(number.to_bytes(16, "big"))))
            try:
                await journal.durable()
            except JournalError:
                return
            took.append((perf_counter_ns() - began) / 1000)
            journal.append(turn_ended(record))

        began = perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(placements):
                group.create_task(place(number))
                ahead = began + (number + 1) / rate - perf_counter() if rate else 0.0
                await asyncio.sleep(max(0.0, ahead))
        seconds = perf_counter() - began
        with suppress(JournalError):  # rows that a silent disk did not take
            await journal.close()
    return {"per_s": round(len(took) / seconds), "refused": placements - len(took), **percentiles(took)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {f"p{p:g}_us": float("nan") for p in PERCENTILES}
    return {f"p{p:g}_us": round(float(np.percentile(values, p)), 2) for p in PERCENTILES}


def show(name: str, row: dict[str, float]) -> None:
    print(f"  {name:32}", "  ".join(f"{key} {value:9.2f}" for key, value in row.items()))


def main() -> None:
    parser = command(__doc__, quick="fewer decisions, same fleet")
    parser.add_argument("--journal", action="store_true", help="measure placements that reach the disk")
    options = parser.parse_args()
    if options.journal:
        durable = {}
        for rate in JOURNAL_RATES:
            row = asyncio.run(measure_journal(rate, 3_000 if options.quick else 20_000))
            durable[str(rate)] = row
            show(f"{rate} a second" if rate else "all at once", row)
        write_json(options.json, durable)
        return
    decisions = 5_000 if options.quick else 30_000
    size = FleetSize(1_000, 300, 100_000, decisions)
    table = measure(size)
    print(f"{size.decoders} decoders, {size.prefillers} prefillers, {size.conversations} live conversations")
    for name, row in table.items():
        show(name, row)
    first, later = table.values()
    figures = {"first_turn_p99_us": first["p99_us"], "later_turn_p99_us": later["p99_us"]}
    write_json(options.json, figures | {"table": table})


if __name__ == "__main__":
    main()
