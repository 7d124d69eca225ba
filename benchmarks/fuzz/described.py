"""Requests that schemathesis makes of the gateway's own OpenAPI document, beside those of `mutations.py`.

Half of the time they are wrong by the document, half of the time right. The document has no models (it is
read without a key) and lets answers be as long as engines take: for the right ones it is told a model, and
short answers. Schemathesis runs in an environment of its own (`make fuzz`), as a process, as long as the
others take: it is slow at making requests.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import orjson

from benchmarks.fuzz.mutations import LENGTHS

WORKERS, REQUEST_LIMIT_S, ENDS_S = 2, 60, 120.0
_EXAMPLES = 100_000  # of each operation; the time is what ends it
_SHORT = {"type": "integer", "minimum": 1, "maximum": 16}
_SHOWN = 4000  # characters of what it says
_ITS_OWN = "Runtime Error"  # what it calls its own: Python 3.11 fails to parse some deep lambdas of it


@dataclass(frozen=True, slots=True)
class Described:
    """What came of it. `unmade`: requests that schemathesis failed to make."""

    requests: int
    failed: bool
    unmade: int
    said: str


def read(report: Mapping[str, Any], said: str) -> Described:
    """A failure is an answer of 500 or above, none at all, or an unusable document."""
    errors = {error["title"]: error["count"] for error in report["errors"]}
    unmade = errors.pop(_ITS_OWN, 0)
    cases = report["test_cases"]
    failed = bool(cases["unique_failures"] or errors or not cases["generated"])
    return Described(cases["generated"], failed, unmade, said)


def described(program: Path, url: str, model: str, seconds: float) -> Described:
    document = httpx.get(f"{url}/openapi.json").raise_for_status().content
    served = orjson.dumps(_served(orjson.loads(document), model))
    halves = [
        _run(program, url, seconds / 2, mode, told)
        for mode, told in (("negative", document), ("positive", served))
    ]
    return Described(
        sum(half.requests for half in halves),
        any(half.failed for half in halves),
        sum(half.unmade for half in halves),
        "\n".join(half.said[-_SHOWN:] for half in halves if half.failed),
    )


def _served(document: dict[str, Any], model: str) -> dict[str, Any]:
    changed = {"model": {"enum": [model]}, "min_tokens": {"enum": [0, 1]}, **dict.fromkeys(LENGTHS, _SHORT)}
    for path in document["paths"].values():
        bodies = path.get("post", {}).get("requestBody", {}).get("content", {})
        fields = bodies.get("application/json", {}).get("schema", {}).get("properties", {})
        for name, said in changed.items():
            if name in fields:
                fields[name] = said
    return document


def _run(program: Path, url: str, seconds: float, mode: str, document: bytes) -> Described:
    with TemporaryDirectory(prefix="conserve-fuzz-") as folder:
        told, report = Path(folder, "openapi.json"), Path(folder, "report.json")
        told.write_bytes(document)
        command = [
            *(str(program), "--no-color", "run", str(told), "--url", url, "--checks", "not_a_server_error"),
            *("--max-examples", str(_EXAMPLES), "--max-time", f"{seconds:.0f}", "--workers", str(WORKERS)),
            *("--mode", mode, "--phases", "coverage,fuzzing", "--continue-on-failure", "--no-shrink"),
            *("--request-timeout", str(REQUEST_LIMIT_S), "--header", "Authorization: Bearer fuzz"),
            *("--report", "json", "--report-json-path", str(report)),
        ]
        try:
            ran = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds + ENDS_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Described(0, True, 0, f"schemathesis did not end {ENDS_S:.0f} s after its time")
        if not report.exists():
            return Described(0, True, 0, ran.stdout)
        return read(orjson.loads(report.read_bytes()), ran.stdout)
