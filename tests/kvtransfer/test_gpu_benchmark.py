"""`python -m benchmarks.gpu` runs without CUDA and loses no figure when a step is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.results import ResultLog, compare_with_plain, read_results
from benchmarks.gpu.runner import SEQUENCE, StepSelectionError, select

REPOSITORY = Path(__file__).parents[2]


def run(path: Path, *options: str, before: str = "") -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # threads that wait for each other use the cores of other tests
        "PYTHONPATH": os.pathsep.join(filter(None, [before, *sys.path])),
    }
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(path), *options]
    return subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=subprocess.DEVNULL)


def test_steps_are_selected_by_name_and_by_group_in_the_order_of_the_sequence() -> None:
    assert [step.name for step in select(["plain", "pages"], [])] == ["pages", "plain"]
    without_engines = select([], ["engines"])
    assert {step.group for step in without_engines} == {"torch"}
    assert "together" not in {step.name for step in select([], [])}, "it needs a GPU of 110 GiB"
    assert "together" in {step.name for step in SEQUENCE}


def test_an_unknown_step_is_refused_with_the_known_names() -> None:
    with pytest.raises(StepSelectionError, match=r"no step or group coservin; there are .*coserving"):
        select(["coservin"], [])


def test_the_result_of_a_repeated_figure_is_its_median(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    for repeat, value in enumerate((3.0, 1.0, 2.0)):
        ResultLog(out, "coserving").add({"tbt_of_1_p50_s": value}, repeat)
    ResultLog(out, "plain").add({"tbt_of_1_p50_s": 1.0})
    with out.open("a") as file:
        file.write('{"step": "plain", "figures": {"tbt')
    found = read_results(out)
    compare_with_plain(found)
    assert found["coserving"]["tbt_of_1_p50_s"] == 2.0
    assert found["coserving"]["tbt_of_1_p50_s_range"] == [1.0, 3.0]
    assert found["coserving"]["tbt_of_1_p50_vs_plain"] == 2.0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_other_steps_run_and_keep_their_figures_when_one_step_is_killed(tmp_path: Path) -> None:
    out, no_vllm = tmp_path / "results.jsonl", tmp_path / "blocked"
    (no_vllm / "vllm").mkdir(parents=True)
    (no_vllm / "vllm" / "__init__.py").write_text("raise ImportError('these steps need no vLLM')\n")
    running = run(out, "--only", "host_copies,aborted_steps,pages", before=str(no_vllm))
    while "aborted_steps" not in (out.read_text() if out.exists() else ""):
        for step in psutil.Process(running.pid).children():
            with suppress(psutil.NoSuchProcess):  # a step that has ended meanwhile
                if "aborted_steps" in step.cmdline():
                    step.send_signal(signal.SIGKILL)
        time.sleep(0.05)
        assert running.poll() is None, "the run ended before the step could be killed"
    assert running.wait(200) != 0, "a failed step is the exit status"
    found = read_results(out)
    assert found["host_copies"]["outcome"] == "ok" and found["host_copies"]["equal"]
    assert found["aborted_steps"]["outcome"] == "failed with status -9"
    assert found["pages"]["outcome"] == "ok" and found["pages"]["equal"]


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_engine_steps_run_one_at_a_time_and_are_compared_with_plain_vllm(tmp_path: Path) -> None:
    """The other steps start engines in the same way. They run by `python -m benchmarks.gpu`, on a CPU too."""
    out, json_file = tmp_path / "results.jsonl", tmp_path / "gpu.json"
    running = run(out, "--only", "coserving,plain", "--json", str(json_file))
    assert running.wait(1490) == 0, {name: one.get("outcome") for name, one in read_results(out).items()}
    found = json.loads(json_file.read_text())
    assert found["coserving"]["iterations"] > 10 and found["coserving"]["offline_tokens_per_s"] > 0
    assert found["coserving"]["tbt_of_4_p50_vs_plain"] > 0 and found["coserving"]["schedule_p50_of_4_ms"] > 0
