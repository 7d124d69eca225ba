"""Class names are unique, exceptions derive from the base of their package, and files have a maximum size."""

import ast
import builtins
import re

import pytest

from benchmarks.structure import PRODUCT, class_names_defined_twice
from tests.structure.trees import MODULES, PRODUCT_MODULES, TEST_MODULES

MAX_LINES = 480
BASES = {
    "placement": "PlacementError",
    "kvtransfer": "KVTransferError",
    "workers": "WorkerError",
    "router": "RouterError",
    "deploy": "DeployError",
    "traces": "TraceError",
}


def test_every_class_name_is_defined_only_once() -> None:
    assert class_names_defined_twice({**MODULES, **TEST_MODULES}) == {}


def test_no_product_file_is_longer_than_the_limit() -> None:
    long = [f"{m.path}: {m.lines} lines" for m in PRODUCT_MODULES.values() if m.lines > MAX_LINES]
    assert not long, "\n".join(long)


def test_suite_marks_are_only_in_test_files_and_conftests() -> None:
    """Pytest looks for the mark of a suite in no other files (tests/conftest.py)."""
    others = [m for m in TEST_MODULES.values() if not m.path.name.startswith(("test_", "conftest"))]
    assert others
    marked = [m.path for m in others if re.search(r"mark\.(engine|fleet|slow)\b", m.text)]
    assert marked == []


@pytest.mark.parametrize("package", PRODUCT)
def test_every_exception_derives_from_its_packages_base(package: str) -> None:
    ours = [module for module in PRODUCT_MODULES.values() if module.package == package]
    defined = {node.name: node for module in ours for node in module.classes}
    wrong = [
        f"{module.name}: {node.name}"
        for module in ours
        for node in module.classes
        if is_exception(above := ancestors(node, defined)) and BASES[package] not in {node.name, *above}
    ]
    assert not wrong, "\n".join(wrong)


def ancestors(node: ast.ClassDef, defined: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names of the bases of a class, and of their bases as far as they are in `defined`."""
    names, left = set[str](), [*node.bases]
    while left:
        name = ast.unparse(left.pop()).rpartition(".")[2]
        if name not in names and name in defined:
            left += defined[name].bases
        names.add(name)
    return names


def is_exception(names: set[str]) -> bool:
    found = (getattr(builtins, name, None) for name in names)
    return any(isinstance(one, type) and issubclass(one, Exception) for one in found) or any(
        name.endswith(("Error", "Exception")) for name in names - {"BaseException"}
    )
