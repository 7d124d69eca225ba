"""The built wheel works without the source tree: its command runs from an empty directory.

A `.pth` file adds the packages that the wheel needs from this environment. The environment's own `.pth`
files, such as that of the tree's editable install, are not read. `make wheel`, then `pip install` into an
empty environment, does the same with packages from an index.
"""

import os
import resource
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fleet import ROOT
from workers.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOP_LEVEL = ("configs", "deploy", "kvtransfer", "placement", "router", "traces", "workers")
SECONDS = 3.0  # processor time until the error is printed


@dataclass(frozen=True)
class Installed:
    python: Path
    empty: Path  # where commands run
    home: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return subprocess.run(
            [*command],
            cwd=self.empty,
            env={**kept, "HOME": str(self.home), "CONSERVE_HOME": str(self.home / "state")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def conserve(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.python.parent / "conserve", *words)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(base)]
    subprocess.run([*pip, *build, str(ROOT)], check=True, timeout=120)
    (wheel,) = base.glob("conserve_llm-*.whl")
    venv.create(base / "venv", with_pip=False)
    python = base / "venv" / "bin" / "python"
    into = ["--python", str(python), "install", "--no-deps", "--no-index", "--no-compile"]
    # If the source tree were on the path, its metadata would count as the installed package.
    away = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, *into, str(wheel)], check=True, timeout=120, env=away, cwd=base)
    (site,) = (base / "venv" / "lib").glob("python3.*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(pytest.__file__).resolve().parents[1]}\n")
    for name in ("empty", "home"):
        (base / name).mkdir()
    return Installed(python, base / "empty", base / "home")


def test_an_installed_wheel_has_all_packages_but_the_tests(installed: Installed) -> None:
    found = installed.run(
        installed.python, "-c", f"import {', '.join(TOP_LEVEL)}; print({', '.join(TOP_LEVEL)})"
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count(str(installed.python.parents[1])) == len(TOP_LEVEL), found.stdout
    left_out = installed.run(installed.python, "-c", "import tests")
    assert "No module named 'tests'" in left_out.stderr


def test_the_fleet_file_that_serve_prints_passes_conserve_check(installed: Installed) -> None:
    printed = installed.conserve("serve", "smollm2", "--print", "--prefill", "0", "--decode", "1")
    assert printed.returncode == 0, printed.stderr
    (installed.empty / "fleet.yaml").write_text(printed.stdout)
    checked = installed.conserve("check", "fleet.yaml")
    (installed.empty / "fleet.yaml").unlink()
    assert checked.stdout.startswith("fleet.yaml: valid: fleet 'smollm2'"), checked.stderr


def test_doctor_of_an_installed_wheel_finds_python_and_vllm(installed: Installed) -> None:
    said = installed.conserve("doctor", "--port", str(free_port("0.0.0.0")))
    assert said.returncode == 0, said.stdout + said.stderr
    assert "ok    Python: 3." in said.stdout and "ok    vLLM: " in said.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["/no/such/model"], "there is no model in /no/such/model, which is no directory: give a directory"),
        (["smollm2", "--max-num-sqs", "3"], "--max-num-sqs: vLLM has no option 'max-num-sqs'; did you mean"),
        (["smollm2", "--", "--max-num-seqs", "many"], "--max-num-seqs: expected an integer, not 'many'"),
        (["smollm2", "--max-model-len", "99999999"], "conversations of 99999999 tokens do not fit"),
    ],
)
def test_serve_of_an_installed_wheel_refuses_an_unservable_model_within_seconds(
    installed: Installed, words: list[str], sentence: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = installed.conserve("serve", *words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith(f"conserve: {sentence}") and said.stderr.count("\n") == 1, said.stderr
    # Processor time, because other tests run at the same time.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS
