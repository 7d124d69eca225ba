"""What fails once and passes alone is named, and fails the run unless the dated list has it."""

from datetime import date, timedelta
from pathlib import Path

import pytest

from tests import run

pytestmark = pytest.mark.slow

TODAY = date(2026, 11, 23)
FLAKY = """
from pathlib import Path

def test_first_time_fails():
    before = Path({before!r})
    if not before.exists():
        before.touch()
        raise AssertionError("once")

def test_passes():
    pass
"""
BROKEN = "def test_fails():\n    raise AssertionError('always')\n"


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_made.py").write_text(FLAKY.format(before=str(tmp_path / "before")))
    return ["test_made.py"], ["-q"]


def flaky_list(tmp_path: Path, since: date | None, reason: str = "made so") -> Path:
    file = tmp_path / "flaky.toml"
    test = f'[[test]]\nid = "test_made.py::test_first_time_fails"\nsince = {since}\nreason = "{reason}"\n'
    file.write_text(test if since else "")
    return file


def test_failing_once_is_named_and_fails(
    suite: tuple[list[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run([[suite]], flaky_list(tmp_path, None), TODAY) == run.FAILED
    said = capsys.readouterr().out
    assert "failed once and passed alone:" in said
    assert "test_made.py::test_first_time_fails   (not in flaky.toml)" in said
    assert "test_passes" not in said


def test_failing_once_is_named_and_passes_when_listed(
    suite: tuple[list[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run([[suite]], flaky_list(tmp_path, TODAY), TODAY) == run.PASSED
    assert "  test_made.py::test_first_time_fails\n" in capsys.readouterr().out


@pytest.mark.parametrize("at_most, ended", [(0, run.FAILED), (1, run.PASSED)])
def test_as_many_others_may_as_the_list_says(
    suite: tuple[list[str], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    at_most: int,
    ended: int,
) -> None:
    file = tmp_path / "flaky.toml"
    file.write_text(f'[[others]]\nat_most = {at_most}\nsince = {TODAY}\nreason = "made so"\n')
    assert run.run([[suite]], file, TODAY) == ended
    assert "test_made.py::test_first_time_fails   (not in flaky.toml)" in capsys.readouterr().out
    assert run.run([], file, TODAY + timedelta(days=31)) == run.FAILED


def test_failing_twice_fails(suite: tuple[list[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(BROKEN)
    assert run.run([[suite]], flaky_list(tmp_path, TODAY), TODAY) == run.FAILED


def test_suites_run_at_once_and_each_is_heard(
    suite: tuple[list[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each waits for the other: one after the other would not end."""
    meets = """
import time
from pathlib import Path

def test_{name}():
    Path({here!r}).touch()
    while not Path({there!r}).exists():
        time.sleep(0.05)
    assert {passes}
"""
    sides = {"one": ("two", True), "two": ("one", False)}
    for name, (other, passes) in sides.items():
        made = {"name": name, "here": str(tmp_path / name), "there": str(tmp_path / other), "passes": passes}
        (tmp_path / f"test_{name}.py").write_text(meets.format(**made))
    suites = [([f"test_{name}.py"], ["-q", "--timeout", "20"]) for name in sides]
    assert run.run([suites], flaky_list(tmp_path, TODAY), TODAY) == run.FAILED
    said = capfd.readouterr().out
    assert "test_two.py, at the same time:" in said and "FAILED test_two.py::test_two" in said
    assert "1 passed" in said and said.count("1 failed") == 3, "twice, and how many are run again"


@pytest.mark.parametrize("since, reason", [(TODAY - timedelta(days=31), "made so"), (TODAY, "")])
def test_an_entry_that_is_old_or_without_reason_fails(tmp_path: Path, since: date, reason: str) -> None:
    assert run.run([], flaky_list(tmp_path, since, reason), TODAY) == run.FAILED


def test_our_list_is_in_order() -> None:
    ours = run.listed(run.FLAKY, date.today())
    assert not ours.wrong
    assert [test for test in ours.ids if not (run.ROOT / test.partition("::")[0]).exists()] == []
