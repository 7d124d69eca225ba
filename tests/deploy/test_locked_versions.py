"""The lock files for CPU and CUDA contain the tested versions and no release known to be harmful."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
HARMFUL = {("litellm", "1.82.7"), ("litellm", "1.82.8")}


def versions(name: str) -> dict[str, str]:
    return dict(
        re.findall(r"^([\w.-]+)(?:\[\w,]+)?==([\w.+]+)", (REQUIREMENTS / name).read_text(), re.MULTILINE)
    )


def major(version: str) -> str:
    return version.split(".")[0]


@pytest.mark.parametrize("package", ["openai", "ray", "pydantic", "sqlalchemy", "msgspec", "grpcio"])
def test_both_lock_files_have_the_same_major_version_of_each_imported_package(package: str) -> None:
    assert major(versions("cpu.txt")[package]) == major(versions("cuda.txt")[package])


def test_the_cuda_lock_file_does_not_contain_lmcache() -> None:
    """The release that pip would choose lacks a feature that we need; lmcache.txt pins one that has it."""
    assert "lmcache" not in versions("cuda.txt")
    assert versions("lmcache.txt")["lmcache"] == "0.5.6"


@pytest.mark.parametrize("file", sorted(path.name for path in REQUIREMENTS.glob("*.txt")))
def test_no_lock_file_has_a_release_known_to_be_harmful(file: str) -> None:
    assert not HARMFUL & set(versions(file).items())
