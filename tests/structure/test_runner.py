"""A test that fails once and passes alone is printed, and fails the run unless flaky.toml lists it."""

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


def flaky_list(tmp_path: Path, since: date | None, reason: str = "known to be flaky") -> Path:
    file = tmp_path / "flaky.toml"
    test = f'[[test]]\nid = "test_made.py::test_first_time_fails"\nsince = {since}\nreason = "{reason}"\n'
    file.write_text(test if since else "")
    return file


def test_a_test_that_fails_once_and_is_not_in_the_flaky_list_fails_the_run(
    suite: tuple[list[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run([[suite]], flaky_list(tmp_path, None), TODAY) == run.FAILED
    output = capsys.readouterr().out
    assert "failed once and passed alone:" in output
    assert "test_made.py::test_first_time_fails   (not in flaky.toml)" in output
    assert "test_passes" not in output


def test_a_test_in_the_flaky_list_may_fail_once(
    suite: tuple[list[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run([[suite]], flaky_list(tmp_path, TODAY), TODAY) == run.PASSED
    assert "  test_made.py::test_first_time_fails\n" in capsys.readouterr().out


@pytest.mark.parametrize("at_most, ended", [(0, run.FAILED), (1, run.PASSED)])
def test_the_flaky_list_limits_how_many_tests_that_it_does_not_name_may_fail_once(
    suite: tuple[list[str], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    at_most: int,
    ended: int,
) -> None:
    file = tmp_path / "flaky.toml"
    file.write_text(f'[[others]]\nat_most = {at_most}\nsince = {TODAY}\nreason = "known to be flaky"\n')
    assert run.run([[suite]], file, TODAY) == ended
    assert "test_made.py::test_first_time_fails   (not in flaky.toml)" in capsys.readouterr().out
    assert run.run([], file, TODAY + timedelta(days=31)) == run.FAILED


def test_a_test_that_fails_twice_fails_the_run(suite: tuple[list[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(BROKEN)
    assert run.run([[suite]], flaky_list(tmp_path, TODAY), TODAY) == run.FAILED


def test_suites_of_a_group_run_at_the_same_time_and_the_output_of_each_is_printed(
    suite: tuple[list[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each suite waits for the other one, so they cannot run one after the other."""
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
    output = capfd.readouterr().out
    assert "test_two.py, at the same time:" in output and "FAILED test_two.py::test_two" in output
    assert "1 passed" in output and output.count("1 failed") == 3, (
        "two summaries, and one line before the retry"
    )


@pytest.mark.parametrize("since, reason", [(TODAY - timedelta(days=31), "known to be flaky"), (TODAY, "")])
def test_a_flaky_list_entry_that_is_old_or_has_no_reason_fails_the_run(
    tmp_path: Path, since: date, reason: str
) -> None:
    assert run.run([], flaky_list(tmp_path, since, reason), TODAY) == run.FAILED


def test_the_flaky_list_of_this_repository_has_no_errors() -> None:
    ours = run.read_flaky_list(run.FLAKY_FILE, date.today())
    assert not ours.errors
    assert [test for test in ours.ids if not (run.ROOT / test.partition("::")[0]).exists()] == []
