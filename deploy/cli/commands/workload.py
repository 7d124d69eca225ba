"""conserve trace, replay, report: workloads made, played against an endpoint, and read."""

import asyncio
import signal
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
from traces.replay import Dialect, Replay, ReplayOptions, ToolStyle
from traces.replay import replay as play
from traces.replay.results import read as read_replay
from traces.replay.results import write as write_replay
from traces.replay.run import ProgressBar

app = typer.Typer()
traces = typer.Typer(no_args_is_help=True, help="Workloads: describe, import, generate, scale.")
generate = typer.Typer(no_args_is_help=True, help="Make a workload from a few numbers.")
traces.add_typer(generate, name="generate")
console = Console()
MIX, LENGTHS = SweBench(), RequestLengths()


Out = Annotated[Path, typer.Option("--out", "-o", help="File to write; gzip when it ends in .gz")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same trace")]
Count = Annotated[int, typer.Option(help="Conversations", min=1)]


@traces.command("describe")
def describe(
    trace: Annotated[Path, typer.Argument(help="A trace in our format, or of a kind that can be imported")],
    picture: Annotated[Path | None, typer.Option(help="Also draw it: PNG, SVG or PDF by the ending")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers")] = None,
) -> None:
    """Print what is in a trace and draw it."""
    from traces import charts  # matplotlib: no other command should wait for it

    found = any_trace(trace)
    what = description(found.conversations)
    console.print(charts.terminal(found.header, what, found.conversations))
    if picture:
        charts.save(charts.picture(found.conversations), picture)
    if json:
        json.write_bytes(orjson.dumps(what.to_json(), option=orjson.OPT_INDENT_2))


@traces.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Files or folders")],
    out: Out,
    kind: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(importers.IMPORTERS)}; else seen")
    ] = None,
) -> None:
    """Bring workloads of other formats into ours; the kind is told from the content."""
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
    lengths = RequestLengths(prompt_tokens, prompt_cv, output_tokens, output_cv)
    _write(out, bursts(count, rate, cv, seed, lengths))


@generate.command("steps")
def generate_steps(
    out: Out,
    step: Annotated[list[str], typer.Option(help="RATE*SECONDS, as often as wanted; the pattern repeats")],
    count: Count = 200,
    seed: Seed = 0,
) -> None:
    """The paper's mix at a rate that jumps."""
    _write(out, step_bursts(count, generators.rate_steps(step), seed))


@traces.command("scale")
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
    """Make a trace faster, longer or shorter, with other waits or other generators."""

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


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace in our format: see `conserve trace`")],
    url: Annotated[
        str, typer.Option(help="OpenAI endpoint, without /v1; of https, SSL_CERT_FILE is trusted")
    ],
    model: Annotated[str, typer.Option(help="Else the first the endpoint lists")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token")] = "",
    label: Annotated[str, typer.Option(help="Name of the run in reports")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the result")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report of one page")] = None,
    seconds: Annotated[float, typer.Option(help="Longest time the replay may take")] = 600.0,
    conversations: Annotated[int, typer.Option(help="Most conversations in flight")] = 256,
    request_timeout: Annotated[float, typer.Option(help="Longest time of an answer, s")] = 300.0,
    probes: Annotated[int, typer.Option(help="Conversations played alone first; 0: no objectives")] = 3,
    slo_factor: Annotated[float, typer.Option(help="Objective: so many times the unloaded latency")] = 5.0,
    dialect: Annotated[Dialect, typer.Option(help="openai: standard fields only")] = Dialect.VLLM,
    tools: Annotated[ToolStyle, typer.Option(help="Tool turns as calls or as plain text")] = ToolStyle.CALLS,
    conversation_header: Annotated[str, typer.Option(help="Send the conversation's id in it")] = "",
    metrics_url: Annotated[
        list[str] | None, typer.Option(help="More pages to read, such as engines'")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(help="Read all pages of a fleet: a file of `conserve targets`")
    ] = None,
    salt: Annotated[
        str, typer.Option(help="Another one makes other texts: nothing cached from before")
    ] = "0",
) -> None:
    """Play conversations as their agents would: wait for the answer, run the tool, append, go on."""
    options = ReplayOptions(
        url=url,
        model=model,
        api_key=api_key,
        dialect=dialect,
        tools=tools,
        max_conversations=conversations,
        time_limit_s=seconds,
        request_timeout_s=request_timeout,
        probes=probes,
        slo_factor=slo_factor,
        conversation_header=conversation_header,
        metrics_urls=(*(metrics_url or ()), *pages_of(targets, url)),
        salt=salt,
    )
    run = asyncio.run(_watched(trace, options, label or trace.stem.removesuffix(".jsonl")))
    if json:
        write_replay(json, run)
    _show([run], html)


def pages_of(targets: Path | None, url: str) -> list[str]:
    """The pages of a target file, without the endpoint's own, which is read anyway."""
    if targets is None:
        return []
    addresses = [address for target in orjson.loads(targets.read_bytes()) for address in target["targets"]]
    return [
        f"http://{address}/metrics" for address in addresses if address != url.split("://")[-1].rstrip("/")
    ]


async def _watched(trace: Path, options: ReplayOptions, label: str) -> Replay:
    """With a progress bar; Ctrl-C ends the playing and still reports what was measured."""
    found = load(trace)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    with ProgressBar(console) as live:
        return await play(found.conversations, options, live, label=label, trace=str(trace), stop=stop)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Results of `conserve replay --json`; two compare")],
    html: Annotated[Path | None, typer.Option(help="Write a report of one page")] = None,
) -> None:
    """Show a result, or several side by side."""
    _show([read_replay(path) for path in results], html)


def _show(runs: list[Replay], html: Path | None) -> None:
    from traces.report import page, terminal  # matplotlib: no other command should wait for it

    console.print(terminal(runs))
    if html:
        html.write_text(page(runs), encoding="utf-8")
        console.print(f"report in {html}")
