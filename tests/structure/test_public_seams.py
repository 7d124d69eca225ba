"""Tests use only the product's public API: no private members, and no object made without its constructor."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.structure import Module
from tests.structure.trees import MODULES, TEST_MODULES

# The first argument of these is an object and the second a name, or they are one dotted name.
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "delitem", "attrgetter", "object", "patch"}

OTHERS = {
    "tests.conftest: _pslinux",  # psutil has no public way to set the boot time
    "tests.deploy.test_ray_cluster_files: _private",  # Ray's own check of a cluster file has no public name
    "tests.kvtransfer.engine.in_process: _KV_CONNECTOR_AGENT",  # vLLM keeps one per process, without a setter
}

# It replaces the event loop, watches what is private, and patches deliberate bugs into the product.
BREAKS_ON_PURPOSE = "tests.simulated."


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


def inherited_private_uses(module: Module, others: dict[str, Module]) -> Iterator[str]:
    """Yield the private names of product classes that subclasses in a test module use or redefine."""
    for cls in module.classes:
        theirs = {name for base in bases(cls, module, others) for name in private_names(base)}
        named = {node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute)}
        yield from (f"{cls.name}.{name}" for name in theirs & (named | private_names(cls)))


def bases(cls: ast.ClassDef, module: Module, others: dict[str, Module]) -> Iterator[ast.ClassDef]:
    """Yield the product classes from which a class derives, directly or through classes of other tests."""
    for base in cls.bases:
        where, name = origin(base, module)
        for found in others[where].classes if where in others else ():
            if found.name == name and found is not cls:
                if others[where].package != "tests":
                    yield found
                yield from bases(found, others[where], others)


def origin(base: ast.expr, module: Module) -> tuple[str, str]:
    """Return the module that defines a class to which `module` refers, and the class's name there."""
    taken = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
    whole = taken.get(first, f"{module.name}.{first}") + (f".{rest}" if rest else "")
    where, _, name = whole.rpartition(".")
    return where, name


def private_names(cls: ast.ClassDef) -> set[str]:
    """Return the private methods and fields of a class, and the private attributes that it sets on itself."""
    found = set()
    for node in ast.walk(cls):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


def is_private(name: str) -> bool:
    """Return whether a name is private; `_`, and `_replace` of named tuples, do not count."""
    return name.startswith("_") and not name.startswith("__") and name not in ("_", "_replace")


def test_no_test_uses_private_members() -> None:
    modules = [one for one in TEST_MODULES.values() if not one.name.startswith(BREAKS_ON_PURPOSE)]
    found = {f"{module.name}: {name}" for module in modules for name in private_uses(module)}
    assert sorted(found - OTHERS) == []


def test_no_subclass_in_tests_uses_or_redefines_private_members_of_the_product() -> None:
    others = {**MODULES, **TEST_MODULES}
    found = [
        f"{module.name}: {name}"
        for module in TEST_MODULES.values()
        if not module.name.startswith(BREAKS_ON_PURPOSE)
        for name in inherited_private_uses(module, others)
    ]
    assert sorted(found) == []


PRODUCT_CLASS = """
class Engine:
    _limit: int = 1
    def __init__(self):
        self._held = 0
    def _end(self): ...
    def end(self): ...
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("def _end(self): ...", ["Mine._end"]),
        ("def end(self): super()._end()", ["Mine._end"]),
        ("def end(self): return self._held", ["Mine._held"]),
        ("_limit = 2", ["Mine._limit"]),
        ("def end(self): self._own = 1", []),
        ("def end(self): super().end()", []),
    ],
)
def test_private_names_of_product_classes_are_found_in_subclasses(body: str, found: list[str]) -> None:
    above = Module("workers.engine", Path("workers/engine.py"), PRODUCT_CLASS)
    between = Module(
        "tests.between", Path("tests/between.py"), "from workers import engine\nclass Two(engine.Engine): ..."
    )
    mine = Module(
        "tests.mine", Path("tests/mine.py"), f"from tests.between import Two\nclass Mine(Two):\n    {body}"
    )
    known = {one.name: one for one in (above, between, mine)}
    assert sorted(inherited_private_uses(mine, known)) == found
