"""Requests that schemathesis makes of the gateway's own OpenAPI document, beside those of `mutations.py`.

It runs in an environment of its own (`make fuzz`), as a process, as long as the others take: it is slow at
making requests.
"""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

WORKERS, REQUEST_LIMIT_S, ENDS_S = 2, 60, 120.0
_MADE = re.compile(r"([\d,]+) generated")
_EXAMPLES = 100_000  # of each operation; the time is what ends it


@dataclass(frozen=True, slots=True)
class Described:
    """What came of it."""

    requests: int
    failed: bool
    said: str


async def described(program: Path, url: str, seconds: float) -> Described:
    """A failure is an answer of 500 or above."""
    command = [
        *(str(program), "--no-color", "run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
        *("--max-examples", str(_EXAMPLES), "--max-time", f"{seconds:.0f}", "--workers", str(WORKERS)),
        *("--mode", "all", "--phases", "coverage,fuzzing", "--continue-on-failure", "--no-shrink"),
        *("--request-timeout", str(REQUEST_LIMIT_S), "--header", "Authorization: Bearer fuzz"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), seconds + ENDS_S)
    except TimeoutError:
        process.kill()
        return Described(0, True, f"schemathesis did not end {ENDS_S:.0f} s after its time")
    said = out.decode(errors="replace")
    made = _MADE.search(said)
    return Described(int(made[1].replace(",", "")) if made else 0, process.returncode != 0, said)
