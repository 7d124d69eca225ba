"""Imports between the packages point one way (docs/architecture.md), and never in a circle."""

import subprocess
import sys

import pytest

from benchmarks.structure import PRODUCT, circles, import_graph
from tests.structure.trees import PRODUCT_MODULES

ALLOWED: dict[str, set[str]] = {
    "placement": set(),
    "kvtransfer": {"placement"},
    "workers": {"placement", "kvtransfer"},
    "router": {"placement"},
    "traces": {"placement"},
    "deploy": {"placement", "kvtransfer", "workers", "router", "traces", "configs"},
}
OURS = {*PRODUCT, "configs", "benchmarks", "tests"}


@pytest.mark.parametrize("package", PRODUCT)
def test_a_package_imports_only_packages_that_it_may_import(package: str) -> None:
    wrong = [
        f"{module.path} imports {source}"
        for module in PRODUCT_MODULES.values()
        if module.package == package
        for source, _ in module.imported()
        if source.partition(".")[0] in OURS - {package} - ALLOWED[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(import_graph(PRODUCT_MODULES)) == []


def test_engines_that_cannot_drop_parameters_do_not_import_the_overload_code() -> None:
    """vLLM imports the overload code by name, and only if the fleet file has `overload: {policy: drop}`."""
    by_name = {"workers.engine.overload.config"}
    wrong = [
        f"{module.path} imports {source}"
        for name, module in PRODUCT_MODULES.items()
        if not name.startswith("workers.engine.overload")
        for source, _ in module.imported()
        if source.startswith("workers.engine.overload") and source not in by_name
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "kvtransfer.metrics",
            {"cryptography", "numpy", "torch", "vllm"},
        ),  # `deploy` reads the metric declarations
        (
            "workers.engine.engine_key",
            {"aiohttp", "vllm"},
        ),  # aiohttp is for the client in the keeper
    ],
)
def test_a_module_that_is_loaded_by_name_imports_no_heavy_library(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]"
