"""A report as one HTML page that needs nothing else: no script, no font, no picture from outside."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from traces import charts
from traces.replay.results import Replay
from traces.report import figures
from traces.report.tables import Table, seconds, tables

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #888; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; font-weight: normal; }
.wide { overflow-x: auto; } .note, dt, td.again { color: var(--soft); }
.runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 0 2rem; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 0 1rem; } dd { margin: 0; }
figure { margin: 1rem 0; background: #fff; padding: .5rem; } figure svg { width: 100%; height: auto; }
"""


def page(runs: Sequence[Replay]) -> str:
    title = " against ".join(run.label for run in runs)
    parts = [f"<h1>Replay: {escape(title)}</h1>"]
    parts.append(f'<div class="runs">{"".join(_facts(run) for run in runs)}</div>')
    latencies, *others = tables(runs)
    parts += [
        f"<figure>{charts.to_svg(figure)}</figure>"
        for figure in (figures.latencies(runs), figures.over_time(runs))
    ]
    parts += [_table(table) for table in (*others, latencies)]  # the longest last
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Replay: {escape(title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(run: Replay) -> str:
    facts = {
        "trace": run.trace,
        "endpoint": run.url,
        "model": run.model,
        "duration": seconds(run.duration_s),
        "text": f"{run.chars_per_token:.2f} characters a token, by {run.calibrated_by}",
    }
    if run.unloaded:
        alone = run.unloaded
        facts["unloaded"] = (
            f"TTFT {seconds(alone.fixed_s)} + {alone.per_token_s * 1e6:.3g} µs a new token, "
            f"TBT {seconds(alone.step_s)}; {alone.probes} probes, "
            f"mean error {alone.ttft_error:.1%} and {alone.tbt_error:.1%}"
        )
    facts["options"] = ", ".join(f"{name} {value}" for name, value in run.options.items() if value != "")
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value
    )
    return f"<section><h2>{escape(run.label)}</h2><dl>{rows}</dl></section>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.columns)
    body = "".join(_row(row, before) for before, row in pairwise((("",), *table.rows)))
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2>{note}<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[str], before: Sequence[str]) -> str:
    """The label of another percentile of the same quantity stands back."""
    again = row[0].rpartition(", ")[0]
    known = again and again == before[0].rpartition(", ")[0]
    label = f'<td class="again">{escape(row[0])}</td>' if known else f"<td>{escape(row[0])}</td>"
    return f"<tr>{label}{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
