"""`conserve trace`: look at workloads, bring them in, make them, change them."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from traces import importers
from traces.describe import describe as description
from traces.format import NotATrace, Trace, TraceError, load, write
from traces.generators import Lengths, Step, SweBench, arrivals, bursts, draws, paper, saturating, step_bursts
from traces.scaling import Scale, fit, rebased
from traces.scaling import scale as scaled

commands = typer.Typer(no_args_is_help=True, help="Workloads: describe, import, generate, scale.")
console = Console()
MIX, LENGTHS = SweBench(), Lengths()


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="trace")


Out = Annotated[Path, typer.Option("--out", "-o", help="File to write; gzip when it ends in .gz")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same trace")]
Count = Annotated[int, typer.Option(help="Conversations", min=1)]


@commands.command("describe")
def describe(
    trace: Annotated[Path, typer.Argument(help="A trace in our format, or of a kind that can be imported")],
    picture: Annotated[Path | None, typer.Option(help="Also draw it: PNG, SVG or PDF by the ending")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers")] = None,
) -> None:
    """Print what is in a trace and draw it."""
    from traces import charts, drawing  # matplotlib: no other command should wait for it

    found = _any(trace)
    what = description(found.conversations)
    console.print(drawing.terminal(found.header, what, found.conversations))
    if picture:
        charts.save(drawing.picture(found.conversations), picture)
    if json:
        json.write_bytes(orjson.dumps(what.to_json(), option=orjson.OPT_INDENT_2))


@commands.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Files or folders")],
    out: Out,
    kind: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(importers.IMPORTERS)}; else seen")
    ] = None,
) -> None:
    """Bring workloads of other formats into ours; the kind is told from the content."""
    _write(out, importers.import_files(files, kind))


generate = typer.Typer(no_args_is_help=True, help="Make a workload from a few numbers.")
commands.add_typer(generate, name="generate")


@generate.command("swe-bench")
def generate_swe_bench(
    out: Out,
    rate: Annotated[float, typer.Option(help="Conversations per second, Poisson")] = 1.0,
    count: Count = 200,
    seed: Seed = 0,
    turns: Annotated[float, typer.Option(help="Mean turns of a conversation")] = MIX.turns,
    tool_s: Annotated[float, typer.Option(help="Mean time of a tool")] = MIX.tool_s,
) -> None:
    """The conversation paper's mix: 15k tokens in, 1k out, short tool answers."""
    mix = SweBench(turns=turns, tool_s=tool_s)
    _write(out, paper(count, rate, seed, mix))


@generate.command("saturating")
def generate_saturating(
    out: Out,
    prefill_rate: Annotated[float, typer.Option(help="Input tokens per second of the prefiller")] = 25_000.0,
    count: Count = 200,
    seed: Seed = 0,
) -> None:
    """The same conversations, spaced so that one prefiller is exactly full."""
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
    """Single turns with gamma gaps, as in BurstGPT and the co-serving paper."""
    lengths = Lengths(prompt_tokens, prompt_cv, output_tokens, output_cv)
    _write(out, bursts(count, rate, cv, seed, lengths))


@generate.command("steps")
def generate_steps(
    out: Out,
    step: Annotated[list[str], typer.Option(help="RATE*SECONDS, as often as wanted; the pattern repeats")],
    count: Count = 200,
    seed: Seed = 0,
) -> None:
    """The paper's mix at a rate that jumps."""
    _write(out, step_bursts(count, tuple(map(_step, step)), seed))


@commands.command("scale")
def scale(
    trace: Annotated[Path, typer.Argument(help="A trace in our format")],
    out: Out,
    rate: Annotated[float, typer.Option(help="Factor; the pattern of arrivals stays")] = 1.0,
    lengths: Annotated[float, typer.Option(help="Factor on all token counts")] = 1.0,
    waits: Annotated[float, typer.Option(help="Factor on tool and human time")] = 1.0,
    wait_cap: Annotated[float, typer.Option(help="Longest wait, s, after scaling")] = float("inf"),
    max_context: Annotated[
        int | None, typer.Option(help="Cut conversations where they would outgrow it")
    ] = None,
    max_turns: Annotated[int | None, typer.Option(help="Cut conversations after so many turns")] = None,
    count: Annotated[int | None, typer.Option(help="Only the first so many")] = None,
    new_arrivals: Annotated[
        str | None,
        typer.Option("--arrivals", help="poisson:RATE, gamma:RATE:CV or steps:RATE*SECONDS,…"),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Make a trace faster, longer or shorter, with other waits or other arrivals."""

    found = load(trace)
    kept = scaled(found.conversations, Scale(rate, lengths, waits, wait_cap))
    if max_context is not None or max_turns is not None:
        kept = fit(kept, max_context or 2**62, max_turns)
    kept = rebased(islice(kept, count))
    if new_arrivals:
        kept = arrivals.arriving(kept, arrivals.parse(new_arrivals, draws.stream(seed, "arrivals")))
    _write(out, Trace(found.header, tuple(kept)))


def _any(path: Path) -> Trace:
    """Our format, or else whatever an importer knows."""
    try:
        return load(path)
    except NotATrace:
        return importers.import_files([path])


def _step(text: str) -> Step:
    try:
        rate, seconds = text.split("*")
        return Step(float(rate), float(seconds))
    except ValueError as error:
        raise TraceError(f"a step is RATE*SECONDS, not {text!r}") from error


def _write(out: Path, trace: Trace) -> None:
    count = write(out, trace.conversations, trace.header)
    console.print(f"{count:,} conversations in {out}")
