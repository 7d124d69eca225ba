"""A vLLM plugin for `benchmarks.gpu`: measures the parts of an iteration, and sets usable random weights.

vLLM loads general plugins in each of its processes, from the entry points that `advertise` writes to a
folder on the path.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.output import quantile

CLOCK_FILE = "CONSERVE_STEP_CLOCK"  # environment variable: file that gets the times of the parts of each step
FLUSH_EVERY = 64  # steps
WEIGHT_SPAN = 0.035  # uniform in ±span has the standard deviation 0.02 of a freshly initialised model


def advertise(folder: Path) -> None:
    """Write package metadata that names this plugin into `folder`, which engines need on their PYTHONPATH."""
    metadata = folder / "conserve_gpu_steps-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: conserve-gpu-steps\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nconserve_gpu_steps = benchmarks.gpu.step_clock:install\n"
    (metadata / "entry_points.txt").write_text(entry)


def install() -> None:
    """Patch vLLM in this process. vLLM calls this when it loads plugins."""
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.engine.core import EngineCoreProc

    dummy_loader.initialize_single_dummy_weight = random_weight
    if path := os.environ.get(CLOCK_FILE):
        EngineCoreProc._process_engine_step = clocked(EngineCoreProc._process_engine_step, Path(path))


def random_weight(tensor: Any) -> None:
    """Fill a weight with random values as in a freshly initialised model.

    With vLLM's own dummy weights, norms are nearly zero and an answer repeats two tokens for ever.
    """
    import torch

    if not torch.is_floating_point(tensor):
        return
    if tensor.dim() < 2:
        tensor.data.fill_(1.0 if tensor.numel() > 1 else 0.5)
        return
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(1234 + tensor.numel() % 1009)
    tensor.data.uniform_(-WEIGHT_SPAN, WEIGHT_SPAN, generator=generator)


def clocked(original: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Return the engine's loop body, changed so that it measures the parts of each step."""
    attached = False

    def process_engine_step(core: Any) -> Any:
        nonlocal attached
        if not attached:
            attached = True
            clock = StepClock(path)
            scheduler, executor = core.scheduler, core.model_executor
            scheduler.schedule = clock.timed("schedule", scheduler.schedule)
            scheduler.update_from_output = clock.timed("update", scheduler.update_from_output)
            executor.execute_model = clock.timed("launch", executor.execute_model)
            executor.sample_tokens = clock.timed("sample", executor.sample_tokens)
            core.step_fn = clock.step(core.step_fn)
            count_graph_modes(clock)
        return original(core)

    return process_engine_step


def count_graph_modes(clock: "StepClock") -> None:
    """Patch vLLM so that `clock` counts the CUDA graph mode of each dispatched step (V1 runner)."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    original = CudagraphDispatcher.dispatch

    def dispatch(self: Any, *arguments: Any, **named: Any) -> Any:
        chosen = original(self, *arguments, **named)
        clock.modes[str(getattr(chosen[0], "name", chosen[0]))] += 1
        return chosen

    CudagraphDispatcher.dispatch = dispatch


class StepClock:
    """Measures the parts of an engine's steps, and writes their times as one JSON line every few steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, float]] = []
        self._row: dict[str, float] = {}
        self.modes: dict[str, int] = defaultdict(int)

    def timed(self, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                self._row[part] = self._row.get(part, 0.0) + time.perf_counter() - began

        return call

    def step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._row = {}
            began = time.perf_counter()
            result = original(*arguments, **named)
            self._row["step"] = time.perf_counter() - began
            self._row["at"] = time.monotonic()
            self._rows.append(self._row)
            if len(self._rows) >= FLUSH_EVERY:
                self.flush()
            return result

        return call

    def flush(self) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"rows": self._rows, "modes": self.modes}) + "\n")
        self._rows = []


def parts_between(path: Path, began: float, ended: float) -> dict[str, float]:
    """Return median and p99, in ms, of each part of the steps between two times of the monotonic clock."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        rows += [row for row in json.loads(line)["rows"] if began <= row["at"] <= ended]
    found: dict[str, float] = {}
    for part in ("schedule", "launch", "sample", "update", "step"):
        values = [1000 * row.get(part, 0.0) for row in rows]
        if values:
            found[f"{part}_p50_ms"], found[f"{part}_p99_ms"] = quantile(values, 0.5), quantile(values, 0.99)
    return found


def graph_modes(path: Path) -> dict[str, int]:
    """Return how many steps were dispatched with each CUDA graph mode."""
    lines = path.read_text().splitlines() if path.exists() else []
    return (
        {f"graphs_{mode}": count for mode, count in json.loads(lines[-1])["modes"].items()} if lines else {}
    )
