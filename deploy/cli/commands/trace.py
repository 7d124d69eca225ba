"""conserve trace: make, import, scale and describe workloads."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from deploy.cli.common import any_trace
from traces import generators, importers
from traces.describe import describe as description
from traces.format import Trace, load, write
from traces.generators import (
    RequestLengths,
    Scale,
    SweBench,
    bursts,
    fit,
    paper,
    rebased,
    saturating,
    step_bursts,
)
from traces.generators import scale as scaled

app = typer.Typer(no_args_is_help=True, help="Workloads: describe, import, generate, scale.")
generate = typer.Typer(no_args_is_help=True, help="Make a workload from a few numbers.")
app.add_typer(generate, name="generate")
console = Console()
MIX, LENGTHS = SweBench(), RequestLengths()

Out = Annotated[Path, typer.Option("--out", "-o", help="File to write; gzip when it ends in .gz")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same trace")]
Count = Annotated[int, typer.Option(help="Number of conversations", min=1)]


@app.command("describe")
def describe(
    trace: Annotated[Path, typer.Argument(help="A trace, of our format or one that can be imported")],
    picture: Annotated[Path | None, typer.Option(help="Also draw it: PNG, SVG or PDF by the ending")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers")] = None,
) -> None:
    """Print what a trace contains, and with --picture draw it."""
    from traces import charts  # matplotlib: no other command should wait for it

    found = any_trace(trace)
    what = description(found.conversations)
    console.print(charts.terminal(found.header, what, found.conversations))
    if picture:
        charts.save(charts.picture(found.conversations), picture)
    if json:
        json.write_bytes(orjson.dumps(what.to_json(), option=orjson.OPT_INDENT_2))


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Files or folders")],
    out: Out,
    kind: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(importers.IMPORTERS)}; by default recognised")
    ] = None,
) -> None:
    """Convert workloads of other formats to ours. The format is recognised from the content."""
    _write(out, importers.import_files(files, kind))


@generate.command("swe-bench")
def generate_swe_bench(
    out: Out,
    rate: Annotated[float, typer.Option(help="Conversations per second, Poisson")] = 1.0,
    count: Count = 200,
    seed: Seed = 0,
    turns: Annotated[float, typer.Option(help="Mean turns of a conversation")] = MIX.turns,
    tool_s: Annotated[float, typer.Option(help="Mean time of a tool")] = MIX.tool_s,
) -> None:
    """Generate the conversation paper's mix: 15k tokens in, 1k out, short tool answers."""
    mix = SweBench(turns=turns, tool_s=tool_s)
    _write(out, paper(count, rate, seed, mix))


@generate.command("saturating")
def generate_saturating(
    out: Out,
    prefill_rate: Annotated[float, typer.Option(help="Input tokens per second of the prefiller")] = 25_000.0,
    count: Count = 200,
    seed: Seed = 0,
) -> None:
    """Generate the conversations of `swe-bench` at the rate that exactly fills one prefiller."""
    _write(out, saturating(count, lambda tokens: tokens / prefill_rate, seed))


@generate.command("bursts")
def generate_bursts(
    out: Out,
    rate: Annotated[float, typer.Option(help="Requests per second")] = 2.0,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of the gaps; 1 is Poisson")] = 0.5,
    count: Count = 500,
    seed: Seed = 0,
    prompt_tokens: Annotated[float, typer.Option(help="Mean")] = LENGTHS.prompt_tokens,
    prompt_cv: Annotated[float, typer.Option(help="0: all the same")] = LENGTHS.prompt_cv,
    output_tokens: Annotated[float, typer.Option(help="Mean")] = LENGTHS.output_tokens,
    output_cv: Annotated[float, typer.Option(help="0: all the same")] = LENGTHS.output_cv,
) -> None:
    """Generate single turns with gamma-distributed gaps, as in BurstGPT and the co-serving paper."""
    lengths = RequestLengths(prompt_tokens, prompt_cv, output_tokens, output_cv)
    _write(out, bursts(count, rate, cv, seed, lengths))


@generate.command("steps")
def generate_steps(
    out: Out,
    step: Annotated[list[str], typer.Option(help="RATE*SECONDS, as often as wanted; the pattern repeats")],
    count: Count = 200,
    seed: Seed = 0,
) -> None:
    """Generate the paper's mix at a rate that changes in steps."""
    _write(out, step_bursts(count, generators.rate_steps(step), seed))


@app.command("scale")
def scale(
    trace: Annotated[Path, typer.Argument(help="A trace in our format")],
    out: Out,
    rate: Annotated[float, typer.Option(help="Factor on the rate of arrivals; their pattern stays")] = 1.0,
    lengths: Annotated[float, typer.Option(help="Factor on all token counts")] = 1.0,
    waits: Annotated[float, typer.Option(help="Factor on tool and human time")] = 1.0,
    wait_cap: Annotated[float, typer.Option(help="Longest wait, s, after scaling")] = float("inf"),
    max_context: Annotated[
        int | None, typer.Option(help="Longest context in tokens; longer conversations are cut")
    ] = None,
    max_turns: Annotated[int | None, typer.Option(help="Most turns; longer conversations are cut")] = None,
    count: Annotated[int | None, typer.Option(help="Number of conversations to keep, from the start")] = None,
    new_arrivals: Annotated[
        str | None,
        typer.Option("--arrivals", help="poisson:RATE, gamma:RATE:CV or steps:RATE*SECONDS,…"),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Make a trace faster, longer or shorter, or change its waits or arrivals."""
    found = load(trace)
    kept = scaled(found.conversations, Scale(rate, lengths, waits, wait_cap))
    if max_context is not None or max_turns is not None:
        kept = fit(kept, max_context or 2**62, max_turns)
    kept = rebased(islice(kept, count))
    if new_arrivals:
        kept = generators.arriving(kept, generators.parse(new_arrivals, generators.stream(seed, "arrivals")))
    _write(out, Trace(found.header, tuple(kept)))


def _write(out: Path, trace: Trace) -> None:
    count = write(out, trace.conversations, trace.header)
    console.print(f"{count:,} conversations in {out}")
