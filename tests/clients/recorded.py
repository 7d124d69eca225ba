"""Requests of real coding agents, stored in requests/ with their long texts shortened."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.recording_proxy import RecordedExchange

FOLDER = Path(__file__).parent / "requests"
LONGEST = 100  # characters of a text
NOT_KEPT = frozenset({"authorization", "host", "content-length", "connection"})
OUR_AGENT = "Python-urllib"  # requests of `conserve run` itself, which lists the models


def record(name: str, exchanges: Iterable[RecordedExchange], renamed: Mapping[str, str]) -> None:
    """Store an agent's requests. `renamed` maps texts of this machine, such as paths, to replacements."""
    kept = [
        {
            "method": one.method,
            "target": one.target,
            "headers": {name: value for name, value in one.headers.items() if name not in NOT_KEPT},
            "body": shortened(json.loads(one.body)) if one.body else None,
        }
        for one in exchanges
        if not one.headers.get("user-agent", "").startswith(OUR_AGENT)
    ]
    text = json.dumps(kept, indent=1, ensure_ascii=False)
    for before, after in renamed.items():
        text = text.replace(before, after)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(text + "\n")


def shortened(value: Any) -> Any:
    """Return a JSON value in which long texts are cut."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST or value.startswith("{") else value[:60] + " […]"
    if isinstance(value, list):
        return [shortened(one) for one in value]
    if isinstance(value, dict):
        return {name: shortened(one) for name, one in value.items()}
    return value


def requests_of(name: str) -> list[dict[str, Any]]:
    """Return the stored requests of an agent, each with `method`, `target`, `headers` and `body`."""
    requests: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return requests
