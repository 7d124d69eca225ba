"""`conserve replay` and `conserve report`: play a trace against an endpoint, and read what came of it."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from traces.format import load
from traces.replay import Dialect, Replay, ReplayOptions, ToolStyle, record
from traces.replay import replay as play
from traces.replay.progress import Live

console = Console()


def register(app: typer.Typer) -> None:
    app.command()(replay)
    app.command()(report)


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace in our format: see `conserve trace`")],
    url: Annotated[str, typer.Option(help="OpenAI endpoint, without /v1")],
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
        metrics_urls=(*(metrics_url or ()), *_pages(targets, url)),
        salt=salt,
    )
    run = asyncio.run(_watched(trace, options, label or trace.stem.removesuffix(".jsonl")))
    if json:
        record.write(json, run)
    _show([run], html)


def _pages(targets: Path | None, url: str) -> list[str]:
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
    with Live(console) as live:
        return await play(found.conversations, options, live, label=label, trace=str(trace), stop=stop)


def report(
    results: Annotated[list[Path], typer.Argument(help="Results of `conserve replay --json`; two compare")],
    html: Annotated[Path | None, typer.Option(help="Write a report of one page")] = None,
) -> None:
    """Show a result, or several side by side."""
    _show([record.read(path) for path in results], html)


def _show(runs: list[Replay], html: Path | None) -> None:
    from traces.report import page, terminal  # matplotlib: no other command should wait for it

    console.print(terminal(runs))
    if html:
        html.write_text(page(runs), encoding="utf-8")
        console.print(f"report in {html}")
