"""The page of a run: what was compared on what, tables, a plot, and what did not run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.peers.figures import OURS
from benchmarks.peers.loads import Play
from benchmarks.relay.page import machine, shown
from traces import charts

Table = Mapping[str, Mapping[str, Mapping[str, float]]]
COLUMNS = {
    "ttfet_p50_s": "TTFET p50",
    "ttfet_p95_s": "TTFET p95",
    "first_ttft_p50_s": "first TTFT p50",
    "first_ttft_p95_s": "first TTFT p95",
    "later_ttft_p95_s": "later TTFT p95",
    "e2e_p95_s": "E2E p95",
    "gap_p99_s": "longest gap p99",
    "recomputed_tokens": "recomputed tokens",
    "cpu_s": "CPU",
    "others_cpu_s": "others' CPU",
    "failed": "failed",
    "refused": "refused",
}
PLOTTED = ("ttfet_p95_s", "later_ttft_p95_s", "e2e_p95_s", "gap_p99_s")
HEAD = """# Beside what people would run instead

Written by `{command}`; run it again to replace it. {machine}
{provisional}
Real vLLM on the CPU build, the same model, options, threads and number of engines for all ({engines}), one
client (`conserve replay`'s player), in turns of one run ({rounds}). `ours` is the product's default, elastic
placing; with `placement: {{first_turns: prefiller}}` it is the conversation paper's rule. SGLang's and vLLM's
routers (`cache_aware`) stand over plain vLLM; Ray Serve LLM runs the engines in its replicas, with its
prefix-aware router. Plain vLLM is vLLM's own server, which on CPUs has the worker in a process of its own;
ours has it in the process of the engine core (`workers/serve.py`), as vLLM has on GPUs: CPU time a token
differs by construction, whoever routes. Seconds, tools and people left out: time to the first token that
speaks to the user (TTFET), to the first token of first and of later turns, to the end of a conversation
(E2E), and the longest time between two pieces of an answer; CPU time of a contender's engines and all beside
them, and what other processes of the machine took meanwhile. Medians of the rounds; failed conversations,
refusals and tokens computed again are sums. `requirements/peers.txt` says how peers are installed.
"""
PROVISIONAL = """
**Provisional**: {why}
"""


def render(table: Table, figures: Mapping[str, float | None], skipped: Mapping[str, str]) -> str:
    lines: list[str] = []
    for trace, contenders in table.items():
        lines.append(f"\n{trace}")
        lines.append(f"{'':30}" + "".join(f"{title:>16}" for title in COLUMNS.values()))
        for contender, values in contenders.items():
            cells = "".join(f"{shown(values[name]):>16}" for name in COLUMNS)
            lines.append(f"{contender:30}{cells}")
    lines += ["", *(f"{name} = {'–' if value is None else value}" for name, value in figures.items())]
    return "\n".join([*lines, *(f"left out: {name}: {why}" for name, why in skipped.items())])


def written(
    table: Table,
    figures: Mapping[str, float | None],
    ratios: Mapping[str, Mapping[str, Sequence[float]]],
    skipped: Mapping[str, str],
    plays: Sequence[Play],
    *,
    command: str,
    rounds: int,
    engines: int,
    plot: str,
    provisional: str,
) -> str:
    parts = [
        HEAD.format(
            command=command,
            machine=machine(),
            provisional=PROVISIONAL.format(why=provisional) if provisional else "",
            engines=engines,
            rounds=f"{rounds} round" if rounds == 1 else f"{rounds} rounds",
        ),
        f"![Ours beside the others]({plot})\n",
    ]
    for play in plays:
        parts.append(f"## {play.name[:1].upper()}{play.name[1:]}\n\n{play.about}\n")
        parts.append("| | " + " | ".join(COLUMNS.values()) + " |")
        parts.append("|---" + "|---:" * len(COLUMNS) + "|")
        for contender, values in table.get(play.name, {}).items():
            parts.append(f"| {contender} | " + " | ".join(shown(values[name]) for name in COLUMNS) + " |")
        parts.append("")
    parts.append(
        "## Named figures\n\nOurs to whichever peer was best at a figure in a round; median of the rounds "
        "(least to most), and the worst trace's median, which is what `--json` has under the name.\n"
    )
    names = list(dict.fromkeys(trace for traces in ratios.values() for trace in traces))
    parts.append("| figure | " + " | ".join(names) + " | worst |")
    parts.append("|---" + "|---:" * (len(names) + 1) + "|")
    for name, value in figures.items():
        cells = [_spread(ratios.get(name, {}).get(trace, ())) for trace in names]
        worst = "–" if value is None else shown(value)
        parts.append(f"| `{name}` | " + " | ".join([*cells, worst]) + " |")
    if skipped:
        parts.append("\n## What did not run\n\n| | why |\n|---|---|")
        parts += [f"| {name} | {' '.join(why.split())} |" for name, why in skipped.items()]
    return "\n".join(parts) + "\n"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def plot(table: Table, path: Path) -> None:
    figure, axes = charts.panels(len(PLOTTED))
    traces = list(table)
    contenders = list(dict.fromkeys(name for rows in table.values() for name in rows))
    width = 0.8 / max(1, len(contenders))
    for axis, field in zip(axes, PLOTTED, strict=True):
        for number, contender in enumerate(contenders):
            colour = charts.COLOURS[number % len(charts.COLOURS)]
            at = [index + number * width for index in range(len(traces))]
            heights = [table[trace].get(contender, {}).get(field, 0.0) for trace in traces]
            hatch = "" if contender == OURS else "//"
            axis.bar(at, heights, width, color=colour, label=contender, hatch=hatch)
        axis.set_xticks([index + 0.4 - width / 2 for index in range(len(traces))], traces)
        axis.set_title(f"{COLUMNS[field]}, s")
    axes[0].legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    charts.save(figure, path)
