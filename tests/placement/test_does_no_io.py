"""No module of placement/ uses files, clocks, the environment, the network or logs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import placement

MODULES = sorted(Path(placement.__file__).parent.rglob("*.py"))
# Modules that decisions on plain data may import: numbers, collections, and the two libraries that fit
# curves.
ALLOWED = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "heapq",
    "itertools",
    "math",
    "re",
    "statistics",
    "typing",
    "numpy",
    "scipy",
    "placement",
}
BUILTINS = {"open", "print", "input", "exec", "eval", "__import__"}


def reached(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.split(".")[0] for alias in names)
            case ast.ImportFrom(module=source):
                yield (source or "").split(".")[0]
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield name


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_no_module_of_placement_does_io(module: Path) -> None:
    assert set(reached(module)) <= ALLOWED


def test_the_check_for_io_finds_file_access_and_clocks(tmp_path: Path) -> None:
    module = tmp_path / "wrong.py"
    module.write_text(
        "import time\nfrom pathlib import Path\n\n\ndef f():\n    return open('x'), time.time()\n"
    )
    assert {"time", "pathlib", "open"} <= set(reached(module)) - ALLOWED
