"""Runs the steps of `benchmarks.gpu` one after another, each in its own process with its own time limit."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.results import ResultLog
from benchmarks.harness.fleet import ROOT
from benchmarks.harness.processes import end_tree
from workers.power.nvml import Gpus, PowerError

TORCH, ENGINES, TOGETHER = "torch", "engines", "together"


@dataclass(frozen=True)
class Step:
    """One measurement. Steps of the group `torch` need no vLLM; the step `together` runs only when named."""

    name: str
    group: str
    limit_s: float
    module: str = ""  # module of the function with the step's name, in the group `torch`


SEQUENCE = (
    Step("host_copies", TORCH, 60, "host_tier_copies"),
    Step("safepoints", TORCH, 30, "aborts"),
    Step("aborted_steps", TORCH, 30, "aborts"),
    Step("pages", TORCH, 30, "page_reuse"),
    Step("coserving", ENGINES, 180),
    Step("plain", ENGINES, 150),
    Step("kept", ENGINES, 150),
    Step("aborts", ENGINES, 150),
    Step("plain-v2", ENGINES, 120),
    Step("handover", ENGINES, 200),
    Step("together", TOGETHER, 480),
)


class StepSelectionError(ValueError):
    """A name in `--only` or `--skip` is neither a step nor a group."""


def select(only: Sequence[str], skip: Sequence[str]) -> list[Step]:
    """Return the steps to run, in the order of `SEQUENCE`. The names are those of steps or groups."""
    known = {step.name for step in SEQUENCE} | {TORCH, ENGINES, TOGETHER}
    if unknown := sorted({*only, *skip} - known):
        raise StepSelectionError(
            f"no step or group {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )

    def named(step: Step, names: Iterable[str]) -> bool:
        return step.name in names or step.group in names

    wanted = only or (TORCH, ENGINES)
    return [step for step in SEQUENCE if named(step, wanted) and not named(step, skip)]


def run_step(step: Step, limit_s: float, device: str, out: Path, cache: Path) -> None:
    """Run one step, and append its outcome to `out`: `ok`, `failed` with the status, or `out of time`."""
    log, began, energy = ResultLog(out, step.name), time.time(), joules()
    command = [sys.executable, "-m", "benchmarks.gpu.step", step.name, "--device", device, "--out", str(out)]
    environment = {
        **os.environ,
        # Later engines find what the first has compiled.
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT") or str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit_s)
        outcome = "ok" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        outcome = f"out of time after {limit_s:.0f} s"
    finally:
        end_tree(process.pid)
    after = joules()
    used = {"joules": after - energy} if after is not None and energy is not None else {}
    log.add({"outcome": outcome, "began": began, "took_s": time.time() - began, **used})


def joules() -> float | None:
    """Return the energy in joules that all GPUs used since the driver was loaded, or None without GPUs."""
    try:
        with Gpus() as gpus:
            return sum(gpus.joules(gpu.uuid) for gpu in gpus.all())
    except (PowerError, ImportError):
        return None
