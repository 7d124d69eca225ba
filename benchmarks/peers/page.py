"""Page of a run of `benchmarks.peers`: set-up, tables, ratios by round, and contenders that did not run."""

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.harness.page import machine, shown, table_lines
from benchmarks.peers.figures import Table
from benchmarks.peers.loads import Play

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
HEAD = """# Our fleets beside other routers

`{command}` writes this page. {machine}
{provisional}
All contenders run real vLLM (CPU build) with the same model, options, threads and number of engines
({engines}), and take turns in one run ({rounds}) with one client, the player of `conserve replay`. `ours`
places elastically, which is the default; with `placement: {{first_turns: prefiller}}` it follows the
conversation paper's rule. SGLang's and vLLM's routers (`cache_aware`) stand over plain vLLM; Ray Serve LLM
runs the engines in its replicas with its prefix-aware router. On CPUs vLLM's own server has the worker in a
process of its own and ours has not (`workers/serve.py`), so CPU time a token differs whichever router is
used. Times are seconds without tools and people: to the first token that speaks to the user (TTFET), to the
first token of first and later turns, to the end of a conversation (E2E), and the longest time between two
pieces of an answer. CPU is the time of a contender's engines and helpers; others' CPU is that of all other
processes. Figures are medians of the rounds; failed conversations, refusals and recomputed tokens are sums.
`requirements/peers.txt` says how to install peers.
"""
RATIOS_HEAD = """## Named figures

Ratios are ours to the best peer of a round at that figure: median of the rounds (least to most), and the
worst trace's median, which `--json` has under the name.
"""


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
    provisional: str,
) -> str:
    """Return the page's Markdown."""
    parts = [
        HEAD.format(
            command=command,
            machine=machine(),
            provisional=f"\n**Provisional**: {provisional}\n" if provisional else "",
            engines=engines,
            rounds=f"{rounds} round" if rounds == 1 else f"{rounds} rounds",
        )
    ]
    for play in plays:
        rows = [
            [contender, *(shown(values[name]) for name in COLUMNS)]
            for contender, values in table.get(play.name, {}).items()
        ]
        title = f"## {play.name[:1].upper()}{play.name[1:]}\n\n{play.about}\n"
        parts += [title, *table_lines(["", *COLUMNS.values()], rows), ""]
    names = list(dict.fromkeys(trace for traces in ratios.values() for trace in traces))
    rows = [
        [
            f"`{name}`",
            *(_spread(ratios.get(name, {}).get(trace, ())) for trace in names),
            "–" if value is None else shown(value),
        ]
        for name, value in figures.items()
    ]
    parts += [RATIOS_HEAD, *table_lines(["figure", *names, "worst"], rows)]
    if skipped:
        reasons = [[name, " ".join(why.split())] for name, why in skipped.items()]
        parts += ["\n## What did not run\n", *table_lines(["", "why"], reasons)]
    return "\n".join(parts) + "\n"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
