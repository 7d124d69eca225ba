"""conserve batch: submit files of requests, watch them, fetch their results."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from deploy.cli.common import FleetOption, gateway_of
from deploy.errors import DeployError
from deploy.lifecycle.endpoint import trust_of

if TYPE_CHECKING:  # it takes a second to import, which every other command would pay
    from openai import APIStatusError, OpenAI
    from openai.types import Batch

API_KEY = "CONSERVE_API_KEY"
_TIMEOUT_S = 600.0


@contextmanager
def client(url: str | None, fleet: str | None, api_key: str | None) -> "Iterator[OpenAI]":
    """Yield an OpenAI client of `url`, or of the named fleet here; turn its errors into DeployError."""
    import openai

    key, trust = api_key or os.environ.get(API_KEY), None
    if url is None:
        url, up = gateway_of(fleet)
        key, trust = key or next(iter(up.gateway.api_keys), None), trust_of(up)
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    calls = openai.DefaultHttpxClient(verify=trust or True)
    try:
        with openai.OpenAI(
            base_url=base, api_key=key or "none", timeout=_TIMEOUT_S, http_client=calls
        ) as api:
            yield api
    except openai.APIStatusError as refused:
        if isinstance(refused, openai.AuthenticationError) and key is None:
            raise DeployError(f"the fleet asks for a key: give --api-key, or set ${API_KEY}") from refused
        raise DeployError(f"{refused.status_code}: {_message(refused)}") from refused
    except openai.APIConnectionError as broken:
        raise DeployError(f"no answer from {broken.request.url}: is the fleet up?") from broken


def _message(refused: "APIStatusError") -> str:
    body = refused.body
    return str(body["message"]) if isinstance(body, dict) and "message" in body else refused.message


app = typer.Typer(no_args_is_help=True, help="Offline work: files of requests through the Batch API.")
console = Console()

_ENDED = ("completed", "failed", "expired", "cancelled")
_POLL_S = 1.0
_SHOWN_ERRORS = 20

Url = Annotated[str | None, typer.Option(help="Address of the gateway; by default that of --fleet")]
Key = Annotated[str | None, typer.Option(help="API key; by default CONSERVE_API_KEY, or the fleet's first")]
Id = Annotated[str, typer.Argument(help="Id of the batch")]
Follow = Annotated[bool, typer.Option("--wait", "-w", help="Show progress until it ends")]


@app.command("submit")
def submit(
    file: Annotated[
        Path, typer.Argument(help="Requests, one JSON object a line", exists=True, dir_okay=False)
    ],
    endpoint: Annotated[str | None, typer.Option(help="By default the url of the first line")] = None,
    window: Annotated[str, typer.Option(help="Time within which it must end: 1h to 7d")] = "24h",
    metadata: Annotated[list[str] | None, typer.Option("--metadata", "-m", help="KEY=VALUE")] = None,
    wait: Follow = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Wait, then write the results here")] = None,
    url: Url = None,
    fleet: FleetOption = None,
    api_key: Key = None,
) -> None:
    """Submit a file of requests and print the id of its batch."""
    pairs = dict(_pair(text) for text in metadata or ())
    where = endpoint or _endpoint_of(file)
    with client(url, fleet, api_key) as api:
        with file.open("rb") as data:
            uploaded = api.files.create(file=(file.name, data), purpose="batch")
        given: dict[str, Any] = {"input_file_id": uploaded.id, "endpoint": where, "completion_window": window}
        batch = api.batches.create(**given, metadata=pairs or None)
        typer.echo(batch.id)
        if wait or out is not None:
            _finish(api, _watched(api, batch), out)


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(help="Number of batches, newest first", min=1, max=100)] = 20,
    url: Url = None,
    fleet: FleetOption = None,
    api_key: Key = None,
) -> None:
    """List the batches of this API key, newest first."""
    with client(url, fleet, api_key) as api:
        found = api.batches.list(limit=limit).data
    for batch in found:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(batch.created_at))
        typer.echo(f"{batch.id}  {batch.status:<11}  {created}  {_counts(batch)}")


@app.command("show")
def show(
    id: Id, wait: Follow = False, url: Url = None, fleet: FleetOption = None, api_key: Key = None
) -> None:
    """Show the state, counts and errors of a batch."""
    with client(url, fleet, api_key) as api:
        batch = api.batches.retrieve(id)
        _print(_watched(api, batch) if wait else batch)


@app.command("cancel")
def cancel(id: Id, url: Url = None, fleet: FleetOption = None, api_key: Key = None) -> None:
    """Cancel a batch. Its existing results stay available."""
    with client(url, fleet, api_key) as api:
        _print(api.batches.cancel(id))


@app.command("results")
def results(
    id: Id,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; by default the terminal")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Failed requests instead of results")] = False,
    url: Url = None,
    fleet: FleetOption = None,
    api_key: Key = None,
) -> None:
    """Write a batch's results, one JSON object per line."""
    with client(url, fleet, api_key) as api:
        batch = api.batches.retrieve(id)
        file_id = batch.error_file_id if errors else batch.output_file_id
        if file_id is None:
            if batch.status not in _ENDED:
                raise DeployError(f"batch {id} is {batch.status}: its files come when it has ended")
            kind = "failed" if errors else "succeeded"
            raise DeployError(f"no request of batch {id} ({batch.status}) {kind}")
        _fetch(api, file_id, out)


def _finish(api: "OpenAI", batch: "Batch", out: Path | None) -> None:
    _print(batch)
    if out is not None and batch.output_file_id is not None:
        _fetch(api, batch.output_file_id, out)
    if batch.status != "completed":
        raise typer.Exit(1)


def _watched(api: "OpenAI", batch: "Batch") -> "Batch":
    """Show a progress bar until the batch job ends, and return the batch job as it then is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TextColumn("[progress.remaining]ends in"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(batch.status, total=None)
        while True:
            counts = batch.request_counts
            done = counts.completed + counts.failed if counts else 0
            total = counts.total if counts and counts.total else None
            progress.update(task, description=batch.status, completed=done, total=total)
            if batch.status in _ENDED:
                return batch
            time.sleep(_POLL_S)
            batch = api.batches.retrieve(batch.id)


def _print(batch: "Batch") -> None:
    typer.echo(f"{batch.id}: {batch.status}: {_counts(batch)}")
    for name in ("output_file_id", "error_file_id"):
        if (file_id := getattr(batch, name)) is not None:
            typer.echo(f"  {name}: {file_id}")
    for error in ((batch.errors and batch.errors.data) or [])[:_SHOWN_ERRORS]:
        where = f"line {error.line}: " if error.line is not None else ""
        typer.echo(f"  {where}{error.message} ({error.code})")


def _counts(batch: "Batch") -> str:
    counts = batch.request_counts
    if counts is None or not counts.total:
        return "requests not counted yet"
    return f"{counts.completed} done, {counts.failed} failed, {counts.total} in all"


def _fetch(api: "OpenAI", file_id: str, out: Path | None) -> None:
    with api.files.with_streaming_response.content(file_id) as answer:
        if out is not None:
            answer.stream_to_file(out)
            return
        for line in answer.iter_lines():
            typer.echo(line)


def _endpoint_of(file: Path) -> str:
    with file.open("rb") as data:
        first = data.readline(16 << 20)
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError) as wrong:
        raise DeployError(f"{file}: the first line has no url: give --endpoint") from wrong


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise DeployError(f"--metadata takes KEY=VALUE, not {text!r}")
    return key, value
