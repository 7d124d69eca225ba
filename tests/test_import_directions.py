"""Imports between our rooms point one way (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED: dict[str, set[str]] = {
    "placement": set(),
    "kvtransfer": {"placement"},
    "workers": {"placement", "kvtransfer"},
    "router": {"placement"},
    "traces": {"placement"},
    "deploy": {"placement", "kvtransfer", "workers", "router", "traces", "configs"},
}
ROOMS = {*ALLOWED, "configs", "benchmarks", "tests"}


def rooms_imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found & ROOMS


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_room_imports_only_what_it_may(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for other in sorted(rooms_imported(path) - {room} - ALLOWED[room])
    ]
    assert not wrong, "\n".join(wrong)
