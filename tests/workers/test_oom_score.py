"""The kernel ends engines before keepers, and keepers before gateways and directory."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.workers.test_leases import directory, start  # noqa: F401, a fixture
from workers import oom_score
from workers.oom_score import OomScore, set_oom_score

FLOOR = 300


class FileWithFloor:
    """Stand-in for /proc/self/oom_score_adj of a process without CAP_SYS_RESOURCE."""

    def __init__(self) -> None:
        self.score = FLOOR

    def read_text(self) -> str:
        return f"{self.score}\n"

    def write_text(self, text: str) -> None:
        if int(text) < FLOOR:
            raise PermissionError("Permission denied")
        self.score = int(text)


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def in_another_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_the_kernel_would_end_engines_first_and_gateways_last() -> None:
    assert OomScore.SERVING < OomScore.BATCH < OomScore.KEEPER < OomScore.ENGINE


def test_an_engine_has_the_oom_score_of_engines_but_its_host_does_not(directory: Path) -> None:  # noqa: F811
    process = start(directory)
    children = psutil.Process(process.record.pid).children(recursive=True)
    assert {score_of(child.pid) for child in children} == {OomScore.ENGINE}
    assert score_of(process.record.pid) == score_of(os.getpid())


def test_a_score_can_be_raised_and_lowered_without_privileges() -> None:
    """An actor starts with Ray's score of 1000 and has to lower it."""
    code = "from workers.oom_score import set_oom_score; set_oom_score(1000); set_oom_score(200); "
    code += "print(open('/proc/self/oom_score_adj').read())"
    assert in_another_process(code) == "200"


@pytest.mark.parametrize(("score", "then"), [(0, 300), (100, 400), (200, 500), (500, 800), (800, 1000)])
def test_the_order_of_scores_is_kept_above_the_score_of_the_container(
    monkeypatch: pytest.MonkeyPatch, score: int, then: int
) -> None:
    file = FileWithFloor()
    monkeypatch.setattr(oom_score, "SCORE_FILE", file)
    set_oom_score(score)
    assert file.score == then
