"""conserve report: show results of `conserve replay`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from traces.replay import Replay
from traces.replay.results import read


def report(
    results: Annotated[list[Path], typer.Argument(help="Results of `conserve replay --json`; two compare")],
    html: Annotated[Path | None, typer.Option(help="Write a report as one HTML page")] = None,
) -> None:
    """Show the result of one replay, or of several side by side."""
    show([read(path) for path in results], html)


def show(runs: list[Replay], html: Path | None) -> None:
    from traces.report import page, terminal  # imports matplotlib, for which no other command should wait

    Console().print(terminal(runs))
    if html:
        html.write_text(page(runs), encoding="utf-8")
        Console().print(f"report in {html}")
