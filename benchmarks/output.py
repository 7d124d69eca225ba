"""What the benchmarks' commands share: their arguments, quantiles, and figures as JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def command(doc: str | None, quick: str = "", json_file: bool = True) -> argparse.ArgumentParser:
    """A parser that shows the module's text, with `--json` and, where there is a short run, `--quick`."""
    spec = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {spec.name.removesuffix('.__main__')}" if spec else None,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if json_file:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def quantile(values: list[float], share: float) -> float:
    """One of them, with so large a share of them before it; 0 where there is none. (What is simulated is put
    between two: `traces.simulator.metrics.percentile`.)"""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def write_json(path: Path | None, figures: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
