"""The command line says what is wrong in a sentence, and finds its commands by itself."""

from pathlib import Path

import pytest

from tests.support.fleet import ROOT, conserve


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path


def test_a_good_file_is_valid(base: Path) -> None:
    answer = conserve(base, "check", "configs/laptop.yaml")
    assert answer.returncode == 0
    assert "valid: fleet 'laptop', model small, 1 x prefill (prefill), 2 x decode (decode)" in answer.stdout


def test_a_wrong_file_is_told_with_its_line_and_without_a_traceback(base: Path) -> None:
    file = base / "wrong.yaml"
    file.write_text((ROOT / "configs" / "laptop.yaml").read_text().replace("replicas: 2", "replcas: 2"))
    for command in ("check", "up"):
        answer = conserve(base, command, str(file))
        assert answer.returncode == 1
        assert "did you mean 'replicas'?" in answer.stderr
        assert str(file) in answer.stderr
        assert "Traceback" not in answer.stderr


def test_what_is_not_up_is_told_as_such(base: Path) -> None:
    answer = conserve(base, "status", "laptop")
    assert (answer.returncode, answer.stderr.strip()) == (
        1,
        "conserve: fleet 'laptop' is not up; start it with: conserve up FILE",
    )
    assert "nothing was up" in conserve(base, "down", "laptop").stdout
    assert "no engine 'decode-0'" in conserve(base, "logs", "decode-0").stderr


def test_every_command_module_is_a_command(base: Path) -> None:
    text = conserve(base, "--help").stdout
    modules = {path.stem for path in (ROOT / "deploy/cli/commands").glob("*.py")} - {"__init__"}
    assert {"up", "down", "status", "check", "logs", "version"} <= modules
    for name in modules:
        assert f" {name} " in text, name
