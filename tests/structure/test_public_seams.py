"""Tests use what the product offers: no private members, no object without its constructor."""

import ast
from collections.abc import Iterator

from benchmarks.structure import Module
from tests.structure.trees import TEST_MODULES

# The first argument of these is an object and the second a name, or they are one dotted name.
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "delitem", "attrgetter", "object", "patch"}

OTHERS = {
    "tests.conftest: _pslinux",  # what the boot time is cannot be told to psutil
    "tests.deploy.test_ray_cluster_files: _private",  # Ray's own check of a cluster file has no public name
    "tests.kvtransfer.engine.in_process: _KV_CONNECTOR_AGENT",  # vLLM has one a process, and no setter
}


def private_uses(module: Module) -> Iterator[str]:
    for node in module.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "os" | "sys")):
                pass
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name) if is_private(name) or name == "__new__":
                yield name
            case ast.ImportFrom(module=source, names=names):
                yield from (alias.name for alias in names if is_private(alias.name))
                yield from (part for part in (source or "").split(".") if is_private(part))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in BY_NAME:
                texts = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
                yield from (part for text in texts for part in text.split(".") if is_private(part))


def is_private(name: str) -> bool:
    """`_` alone is a name nobody needs; `_replace` is what a named tuple offers."""
    return name.startswith("_") and not name.startswith("__") and name not in ("_", "_replace")


def test_no_test_uses_private_members() -> None:
    found = {f"{module.name}: {name}" for module in TEST_MODULES.values() for name in private_uses(module)}
    assert sorted(found - OTHERS) == []
