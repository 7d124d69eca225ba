"""Runs the GPU steps one after the other, each in a process of its own with its own time limit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.gpu.energy import joules
from benchmarks.gpu.results import ResultLog

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH, ENGINES, TOGETHER = "torch", "engines", "together"


@dataclass(frozen=True)
class Step:
    """A step of the sequence. Steps of the group `torch` need no vLLM; `together` runs only when named."""

    name: str
    group: str
    limit_s: float


SEQUENCE = (
    Step("step_anatomy", TORCH, 60),
    Step("host_copies", TORCH, 60),
    Step("vllm_copy_blocks", TORCH, 60),
    Step("registration", TORCH, 30),
    Step("aborted_steps", TORCH, 30),
    Step("between_processes", TORCH, 60),
    Step("kernels_beside_copies", TORCH, 30),
    Step("safepoints", TORCH, 30),
    Step("pages", TORCH, 30),
    Step("coserving", ENGINES, 180),
    Step("plain", ENGINES, 150),
    Step("plain-sync", ENGINES, 120),
    Step("kept", ENGINES, 150),
    Step("aborts", ENGINES, 150),
    Step("coserving-piecewise", ENGINES, 120),
    Step("plain-v2", ENGINES, 120),
    Step("kept-blhnc", ENGINES, 120),
    Step("handover", ENGINES, 200),
    Step("together", TOGETHER, 480),
)


class StepSelectionError(ValueError):
    """A name in `--only` or `--skip` is neither a step nor a group."""


def select(only: Sequence[str], skip: Sequence[str]) -> list[Step]:
    """Return the steps to run, in the order of the sequence. Names may be steps or groups."""
    known = {step.name for step in SEQUENCE} | {TORCH, ENGINES, TOGETHER}
    if unknown := sorted({*only, *skip} - known):
        raise StepSelectionError(
            f"no step or group {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )

    def named(step: Step, names: Iterable[str]) -> bool:
        return step.name in names or step.group in names

    wanted = only or (TORCH, ENGINES)
    return [step for step in SEQUENCE if named(step, wanted) and not named(step, skip)]


def run_step(step: Step, device: str, out: Path, cache: Path) -> None:
    """Run one step and append how it ended: `ok`, `failed` with the status, or `out of time`."""
    log, began, energy = ResultLog(out, step.name), time.time(), joules()
    command = [sys.executable, "-m", "benchmarks.gpu.step", step.name, "--device", device, "--out", str(out)]
    environment = {
        **os.environ,
        # Later engines find what the first has compiled.
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT") or str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
    }
    process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, start_new_session=True)
    try:
        status = process.wait(step.limit_s)
        outcome = "ok" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        outcome = f"out of time after {step.limit_s:.0f} s"
    finally:
        end_tree(process.pid)
    after = joules()
    used = {"joules": after - energy} if after is not None and energy is not None else {}
    log.add({"outcome": outcome, "began": began, "took_s": time.time() - began, **used})


def end_tree(pid: int) -> None:
    """End a process, its descendants and its process group, and wait until they are gone."""
    try:
        tree = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, timeout=20)
