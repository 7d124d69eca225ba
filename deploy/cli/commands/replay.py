"""conserve replay: play a workload against an endpoint."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from deploy.cli.commands.report import show
from traces.format import load
from traces.replay import Dialect, Replay, ReplayOptions, ToolStyle
from traces.replay import replay as play
from traces.replay.results import write
from traces.replay.run import ProgressBar


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace in our format: see `conserve trace`")],
    url: Annotated[
        str, typer.Option(help="OpenAI endpoint, without /v1; for https, SSL_CERT_FILE is trusted")
    ],
    model: Annotated[str, typer.Option(help="By default the first that the endpoint lists")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token")] = "",
    label: Annotated[str, typer.Option(help="Name of the run in reports")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the result")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report as one HTML page")] = None,
    seconds: Annotated[float, typer.Option(help="Longest time the replay may take")] = 600.0,
    conversations: Annotated[int, typer.Option(help="Most conversations in flight")] = 256,
    request_timeout: Annotated[float, typer.Option(help="Longest time of an answer, s")] = 300.0,
    probes: Annotated[int, typer.Option(help="Conversations played alone first; 0: no objectives")] = 3,
    slo_factor: Annotated[float, typer.Option(help="Objective, as a multiple of the unloaded latency")] = 5.0,
    dialect: Annotated[Dialect, typer.Option(help="openai: standard fields only")] = Dialect.VLLM,
    tools: Annotated[ToolStyle, typer.Option(help="Tool turns as calls or as plain text")] = ToolStyle.CALLS,
    conversation_header: Annotated[str, typer.Option(help="Header that carries the conversation's id")] = "",
    metrics_url: Annotated[
        list[str] | None, typer.Option(help="More metric pages to read, such as engines'")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(help="Read all metric pages of a fleet: a file of `conserve targets`")
    ] = None,
    salt: Annotated[
        str, typer.Option(help="Another value makes other texts, so that no cache holds them")
    ] = "0",
) -> None:
    """Play conversations as agents would: wait for the answer, run the tool, append, continue."""
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
        write(json, run)
    show([run], html)


def pages_of(targets: Path | None, url: str) -> list[str]:
    """Return the metric pages in file `targets`, except the page of `url`, which every replay reads."""
    if targets is None:
        return []
    addresses = [address for target in orjson.loads(targets.read_bytes()) for address in target["targets"]]
    return [
        f"http://{address}/metrics" for address in addresses if address != url.split("://")[-1].rstrip("/")
    ]


async def _watched(trace: Path, options: ReplayOptions, label: str) -> Replay:
    """Replay the trace with a progress bar and return what was measured, even if Ctrl-C ends it early."""
    found = load(trace)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    with ProgressBar(Console()) as live:
        return await play(found.conversations, options, live, label=label, trace=str(trace), stop=stop)
