"""The conversation paper's evaluation in simulation: Figures 10 to 13, sensitivity, and real conversations.

python -m benchmarks.paper [--quick] [--json FILE] [--out DIR] [--traces FILE] [--rate R]

`--traces` takes our format and any that `conserve trace import` knows; by default, the shipped sample.
"""

from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.output import command, write_json
from benchmarks.paper import a40, elastic, real, sensitivity
from benchmarks.paper.a40 import A40
from benchmarks.paper.claims import Claim, claims
from benchmarks.paper.experiment import PaperBench, PaperFigures, run_all
from benchmarks.paper.workload import PaperMix
from traces.simulator.policies import System

console = Console(width=180)


def main() -> None:
    parser = command(__doc__, quick="fewer rates and variants")
    parser.add_argument("--out", type=Path, help="folder for the plots")
    parser.add_argument("--traces", type=Path, default=real.SAMPLE)
    parser.add_argument(
        "--rate", type=float, default=0.2, help="arrivals of the real conversations, a second"
    )
    options = parser.parse_args()

    calibration = A40()
    console.print(f"engine: {calibration.latency()}\npower: {calibration.power()}")
    found = run_all(PaperBench(calibration, PaperMix()), options.quick)
    told = claims(found)
    _show_claims(told)
    _show("Every run", [_flat(run.row()) for run in (*found.by_rate, *found.saturated.values())])
    _show("AMPD by error rate", [_flat(run.row()) for run in found.by_error])
    moved = [asdict(row) for row in sensitivity.table(options.quick)]
    _show("Sensitivity: each claim when one constant or assumption moves", _turned(moved))
    trace = real.load(options.traces, options.rate)
    rows = [asdict(row) for row in real.table(trace, calibration)]
    _show(f"{len(trace)} real conversations, lengths / {real.SHRINK}, {options.rate}/s", rows)
    rules = [asdict(row) for row in sensitivity.fit_rules(calibration)]
    _show("When a conversation fits on a decoder: what counts against it", rules)
    elastic_rows = list(elastic.table(options.traces, calibration, options.quick))
    elastic.show(elastic_rows, console)
    if options.out:
        from benchmarks.paper import plots

        for path in plots.draw(found, options.out):
            console.print(f"drawn: {path}")
    table: dict[str, Any] = {
        "claims": [asdict(claim) for claim in told],
        "by_rate": [run.row() for run in found.by_rate],
        "saturated": [run.row() for run in found.saturated.values()],
        "by_error": [run.row() for run in found.by_error],
        "capped": [run.row() for run in found.capped.values()],
        "sensitivity": moved,
        "real": rows,
        "fit_rules": rules,
        "elastic": [asdict(row) for row in elastic_rows],
    }
    named = headlines(found) | elastic.headlines(elastic_rows)
    write_json(options.json, named | {"table": table})


def headlines(found: PaperFigures) -> dict[str, float]:
    """The named figures. Reductions and gains are shares: 0.51 is 51 %."""
    ours = found.saturated[System.PREFILLER.value]
    ampd = found.saturated[System.AMPD.value]
    return {
        "p95_ttfet_vs_ampd10": round(1 - ours.ttfet.p95_s / ampd.ttfet.p95_s, 4),
        "slo_violations": max(run.violations for run in found.of(System.PREFILLER.value)),
        "tokens_per_joule_gain_capped": round(
            found.capped[System.PREFILLER.value].tokens_per_joule / ours.tokens_per_joule - 1, 4
        ),
        "full_disagg_gmean_ttfet": round(found.saturated[System.FULL_DISAGGREGATION.value].ttfet.gmean, 3),
        "ours_gmean_ttfet": round(ours.ttfet.gmean, 3),
    }


def _show_claims(told: Iterable[Claim]) -> None:
    table = Table(
        title=f"The paper's claims ({a40.SATURATED_RATE} conv/s saturates; holds: its direction does)",
        title_justify="left",
    )
    for field in fields(Claim):
        table.add_column(field.name, overflow="fold")
    for claim in told:
        holds = "yes" if claim.holds else "[bold red]no[/]"
        table.add_row(claim.figure, claim.what, claim.paper, claim.ours, holds, claim.why)
    console.print(table)


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(rows[0]):
        table.add_column(name.replace("_", " "), justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def _turned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a claim and a column a variant, numbered: twenty claims are too wide for a terminal."""
    for number, row in enumerate(rows, 1):
        console.print(f"  {number}: {row['name'].strip()}")
    return [
        {"claim": name.replace("_", " "), **{str(n): f"{row[name]:.3g}" for n, row in enumerate(rows, 1)}}
        for name in rows[0]
        if name != "name"
    ]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Nested latencies as columns, only those that fit in a terminal."""
    kept = ("gmean", "p95", "violations")
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name} {part}": value[part] for part in kept}
        elif name not in ("cap_w", "transfers"):
            flat[name] = value
    return flat


if __name__ == "__main__":
    main()
