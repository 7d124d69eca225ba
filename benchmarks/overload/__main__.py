"""Overload: what gives way when the KV does not suffice, and what comes of it.

python -m benchmarks.overload --computed [--quick] [--json FILE] [--traces FILE]
python -m benchmarks.overload --live [--quick] [--load LOAD] [--json FILE]

`preempt` is plain vLLM behind the same placing, without the gate (`fill`): running turns are computed again,
idle KV is lost. `park`: both go to the host. `drop`: parameters give way as well (placement/overload/).
`pipeline always` are pairs by configuration, and `KV without limit` is what to measure a policy about memory
by. Computed is on the simulator's clock; live are bursts on vLLM's CPU build: plain engines, and two fleets.
docs/measurements/overload.md has the tables, and what they say.
"""

from collections.abc import Sequence
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.output import command, write_json
from benchmarks.overload import agents, computed, live
from benchmarks.overload.setups import A800, BURSTS_THRICE, H800, SET_UPS
from benchmarks.paper import real

# Paper, section 5: against its baselines, the ablation on LongBench with 14B, restoration, the extreme burst.
PAPER = {
    "P99 TTFT of the baselines / drop's": "12.7 to 72.2",
    "the same, LongBench, 72B": "8.4 to 11.9",
    "P50 TBT of drop / baselines'": "1.16 to 1.23 (LongBench)",
    "dynamic drop alone: P99 TTFT of preempt / it": "11.7",
    "coordinated exchange: P99 TTFT before / after": "1.5",
    "lookahead: P99 TBT before / after": "1.12",
    "bubbles without and with lookahead": "21.9 %, 8.3 %",
    "longest exchange": "1.3 s (1 to 2 s)",
    "never restored: P50 TBT / restored": "1.30 (23 % lower when restored)",
    "extreme burst: KV gained": "57 %",
    "extreme burst: time until the KV is full, drop / without": "1.5",
}

NARROW = {"late_share", "preemptions", "gate_wait_mean_s", "split_s", "exchange_most_s"}
OUTCOME = [column for column in fields(computed.OverloadRow) if column.name not in NARROW]


def main() -> None:
    parser = command(__doc__, quick="one set-up where the KV is the bottleneck and one where computing is")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--computed", action="store_true", help="on the simulator's clock")
    how.add_argument("--live", action="store_true", help="plain vLLM, park and drop on this machine")
    parser.add_argument("--traces", type=Path, default=real.SAMPLE, help="real conversations, any format")
    parser.add_argument(
        "--load", action="append", choices=list(live.LOADS), help="of --live; each of them, unless said"
    )
    options = parser.parse_args()
    if options.live:
        loads = [load for load in live.LOADS if load in (options.load or live.LOADS)]
        _live(loads, options.quick, options.json)
    else:
        _computed(options.quick, options.traces, options.json)


def _live(loads: Sequence[str], quick: bool, file: Path | None) -> None:
    figures, table = live.measured(loads, quick)
    for name, row in table.items():
        for column, value in row.items():
            print(f"{name} {column} = {value:.4g}")
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    write_json(file, figures | {"table": table})


def _computed(quick: bool, traces: Path, file: Path | None) -> None:
    console = Console(width=200)
    set_ups = SET_UPS[2::2] if quick else SET_UPS
    rows = computed.all_set_ups(set_ups)
    _show(console, "What gives way, by set-up", rows, OUTCOME)
    ablation = [row for one in SET_UPS[2::2][:2] for row in computed.compared(one, computed.ABLATION)]
    _show(console, "Ablation: what each technique adds", ablation, OUTCOME)
    restoration = list(computed.compared(BURSTS_THRICE, computed.RESTORATION))
    _show(console, "A long run with three bursts: restoration", restoration, OUTCOME)
    extremes = [row for one in (SET_UPS[3], SET_UPS[5]) for row in computed.extreme(one)]
    _show(console, "A burst without end", extremes, fields(computed.Extreme))
    conversations = list(agents.table(traces, quick))
    _show(console, "Real conversations", conversations, fields(agents.AgentsRow))
    found = computed.headlines(rows, {one.name for one in set_ups if one.paper})
    ours = computed.beside_the_paper(rows, ablation, restoration, extremes)
    table = Table(title="Paper / ours", title_justify="left")
    for name in ("", "paper", "paper's lengths", "long answers"):
        table.add_column(name)
    for name, stated in PAPER.items():
        table.add_row(name, stated, *ours[name])
    console.print(table)
    for name, value in found.items():
        console.print(f"{name} = {value}")
    figures: dict[str, Sequence[Any]] = {
        "set_ups": rows, "ablation": ablation, "restoration": restoration, "extreme": extremes,
        "conversations": conversations,
    }  # fmt: skip
    tables = {name: [asdict(row) for row in found_rows] for name, found_rows in figures.items()}
    profiles = {cluster.name: asdict(cluster.profile()) for cluster in (A800, H800)}
    write_json(file, found | {"paper": PAPER, "ours": ours, "tables": tables, "profiles": profiles})


def _show(console: Console, title: str, rows: Sequence[Any], columns: Sequence[Field[Any]]) -> None:
    shown = Table(title=title, title_justify="left", box=None)
    for column in columns:
        text = column.name in ("load", "policy")
        shown.add_column(column.name.replace("_", " "), justify="left" if text else "right", no_wrap=text)
    for row in rows:
        values = (getattr(row, column.name) for column in columns)
        shown.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    console.print(shown)


if __name__ == "__main__":
    main()
