"""Requests that schemathesis generates from the gateway's own OpenAPI document.

For half of the time the requests violate the document, and for half of it they follow it. For valid requests,
the fleet's model and a limit on the length of answers are added to the document, which has neither.
Schemathesis runs as a process in an environment of its own (`make fuzz`). It makes requests slowly, and
therefore runs for as long as the other malformed requests are sent.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import orjson

from tests.fuzz.mutations import LENGTHS

WORKERS, REQUEST_LIMIT_S, END_LIMIT_S = 2, 60, 120.0
EXAMPLES = 100_000  # for each operation; the time limit ends a run earlier
SHORT = {"type": "integer", "minimum": 1, "maximum": 16}
SHOWN_CHARACTERS = 4000
OWN_FAILURE = "Runtime Error"  # a failure of schemathesis itself: Python 3.11 cannot parse some deep lambdas


@dataclass(frozen=True, slots=True)
class Described:
    """Outcome of a run of schemathesis: its requests, those that it could not generate, and its output."""

    requests: int
    failed: bool
    unmade: int
    output: str


def described(program: Path, url: str, model: str, seconds: float) -> Described:
    document = httpx.get(f"{url}/openapi.json").raise_for_status().content
    halves = [
        _run(program, url, seconds / 2, "negative", document),
        _run(program, url, seconds / 2, "positive", _with_model(document, model)),
    ]
    return Described(
        sum(half.requests for half in halves),
        any(half.failed for half in halves),
        sum(half.unmade for half in halves),
        "\n".join(half.output[-SHOWN_CHARACTERS:] for half in halves if half.failed),
    )


def _with_model(document: bytes, model: str) -> bytes:
    changes = {"model": {"enum": [model]}, "min_tokens": {"enum": [0, 1]}, **dict.fromkeys(LENGTHS, SHORT)}
    changed: dict[str, Any] = orjson.loads(document)
    for path in changed["paths"].values():
        bodies = path.get("post", {}).get("requestBody", {}).get("content", {})
        fields = bodies.get("application/json", {}).get("schema", {}).get("properties", {})
        fields |= {name: value for name, value in changes.items() if name in fields}
    return orjson.dumps(changed)


def _run(program: Path, url: str, seconds: float, mode: str, document: bytes) -> Described:
    with TemporaryDirectory(prefix="conserve-fuzz-") as folder:
        schema, report = Path(folder, "openapi.json"), Path(folder, "report.json")
        schema.write_bytes(document)
        command = [
            *(str(program), "--no-color", "run", str(schema), "--url", url, "--checks", "not_a_server_error"),
            *("--max-examples", str(EXAMPLES), "--max-time", f"{seconds:.0f}", "--workers", str(WORKERS)),
            *("--mode", mode, "--phases", "coverage,fuzzing", "--continue-on-failure", "--no-shrink"),
            *("--request-timeout", str(REQUEST_LIMIT_S), "--header", "Authorization: Bearer fuzz"),
            *("--report", "json", "--report-json-path", str(report)),
        ]
        out, limit = subprocess.PIPE, seconds + END_LIMIT_S
        try:
            ran = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return Described(0, True, 0, f"schemathesis did not end {END_LIMIT_S:.0f} s after its time")
        if not report.exists():
            return Described(0, True, 0, ran.stdout)
        found = orjson.loads(report.read_bytes())
    # A failure is a status of 500 or above, a missing answer, or an unusable document.
    errors = {error["title"]: error["count"] for error in found["errors"]}
    unmade, cases = errors.pop(OWN_FAILURE, 0), found["test_cases"]
    failed = bool(cases["unique_failures"] or errors or not cases["generated"])
    return Described(cases["generated"], failed, unmade, ran.stdout)
