"""Makes the command lines, quantiles, tables and JSON files of benchmarks."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def command(
    doc: str | None, quick: str = "", fleet: Path | None = None, seed: int | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the help text `doc` and `--json`; each other argument given adds its option."""
    spec = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {spec.name.removesuffix('.__main__')}" if spec else None,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if fleet:
        parser.add_argument("--fleet", type=Path, default=fleet, help=f"fleet file (default: {fleet.name})")
    if seed is not None:
        parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of the values; 0 if there are none.

    Unlike `traces.simulator.metrics.percentile`, the result is always one of the values.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def report(path: Path | None, figures: Row, **more: Any) -> None:
    """Print the figures; if there is a path, write them and `more` there as one JSON object."""
    print_figures(figures)
    write_json(path, {**figures, **more})


def write_json(path: Path | None, content: Any) -> None:
    """Write `content` as JSON if there is a path; rows in it may be dataclasses."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1, default=asdict) + "\n")


def print_figures(figures: Row) -> None:
    """Print the figures, one per line."""
    for name, value in figures.items():
        print(f"{name} = {'–' if value is None else f'{value:.4g}' if isinstance(value, float) else value}")


def print_rows(title: str, rows: Iterable[Any], width: int = 200) -> None:
    """Print rows as a table; the rows are dataclasses or mappings with the same keys."""
    from rich.console import Console
    from rich.table import Table

    found = [asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row) for row in rows]
    table = Table(title=title, title_justify="left", box=None)
    for name, value in (found[0] if found else {}).items():
        is_text = isinstance(value, str)
        table.add_column(name.replace("_", " "), justify="left" if is_text else "right", no_wrap=is_text)
    for row in found:
        table.add_row(*(f"{one:.4g}" if isinstance(one, float) else str(one) for one in row.values()))
    Console(width=width).print(table)


def named_rows(name: str, rows: Mapping[str, Row]) -> list[Row]:
    """Return the rows of a mapping, each with its key as the first column `name`."""
    return [{name: key, **row} for key, row in rows.items()]
