"""A replay as JSON and back. The figures stand beside the measurements they are from."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from traces.describe import PERCENTILES
from traces.format import TraceError
from traces.replay.results import Replay
from traces.replay.summary import summarise

FORMAT = "conserve-replay/1"
_REPLAY = TypeAdapter(Replay)


def to_json(run: Replay) -> dict[str, Any]:
    summary = summarise(run)
    figures = asdict(summary)
    figures["percentiles"] = list(PERCENTILES)
    for name, objective in summary.objectives.items():
        figures["objectives"][name]["violation_share"] = objective.violation_share
    return {"format": FORMAT, "summary": figures, "run": asdict(run)}


def write(path: Path, run: Replay) -> None:
    path.write_bytes(orjson.dumps(to_json(run)))


def read(path: Path) -> Replay:
    try:
        row = orjson.loads(path.read_bytes())
        if not isinstance(row, dict) or row.get("format") != FORMAT:
            raise TraceError(f"{path}: not a result of `conserve replay` ({FORMAT})")
        return _REPLAY.validate_python(row["run"])
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, ValidationError) as error:
        raise TraceError(f"{path}: not a result of `conserve replay`: {error}") from error
