"""The files in requirements/ pin every installed package to one version, with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HASHED = re.compile(r"(\S+==[^\s\\]+)( ; [^\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def locked(name: str) -> dict[str, Requirement]:
    """Return the packages in a lock file; fail if the file has a line that is not a version with hashes."""
    text = (ROOT / "requirements" / name).read_text()
    assert not HASHED.sub("", text), "these have no hashes"
    found = [Requirement(match[1]) for match in HASHED.finditer(text)]
    return {canonicalize_name(one.name): one for one in found}


def wanted(extras: list[str]) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    all_of_them = [*PROJECT["dependencies"], *(one for extra in extras for one in optional[extra])]
    return [Requirement(one) for one in all_of_them if not one.startswith("conserve-llm[")]


@pytest.mark.parametrize(
    ("file", "extras"), [("cpu.txt", ["cpu", "dev", "postgres"]), ("cuda.txt", ["cuda", "postgres"])]
)
def test_every_dependency_is_locked_with_hashes(file: str, extras: list[str]) -> None:
    there = locked(file)
    for needs in wanted(extras):
        (version,) = there[canonicalize_name(needs.name)].specifier
        assert needs.specifier.contains(version.version), (needs, version)


def test_the_image_pins_its_base_by_digest_and_installs_locked_packages() -> None:
    said = (ROOT / "Dockerfile").read_text()
    bases = re.findall(r"^(?:ARG BASE=|FROM )(\S+)", said, re.MULTILINE)
    assert bases and all(re.search(r"@sha256:[0-9a-f]{64}$", one) for one in bases if one != "${BASE}")
    for line in re.findall(r"pip install (.*)", said):
        assert "--no-deps" in line and ("--require-hashes" in line or "/wheels/conserve_llm-" in line)


def test_make_installs_only_packages_with_hashes() -> None:
    assert set(locked("uv.txt")) == {"uv"}
    script = (ROOT / "deploy" / "setup" / "install.sh").read_text()
    from_an_index = re.findall(r"install --no-deps(?! --no-build-isolation)[^\n]*", script)
    without = [one for one in from_an_index if "--require-hashes" not in one]
    assert len(from_an_index) > 1 and without == ["install --no-deps torch==2.13.0+cpu)"]
    # The exception is for versions of Python for which the list has no torch.
    assert "torch==2.13.0+cpu ; python_version < '3.12' " in (ROOT / "requirements" / "cpu.txt").read_text()
