"""Steps that need torch and no vLLM: each takes a device, "cuda" or "cpu", and returns figures."""

import importlib
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.energy import joules
from benchmarks.gpu.figures import Figures

Step = Callable[[str], Figures]


def _step(module: str, name: str) -> Step:
    """Import a step's module when it is run: what one step lacks on a lent machine stops no other."""

    def run(device: str) -> Figures:
        step: Step = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        return step(device)

    return run


STEPS: dict[str, Step] = {
    "step_anatomy": _step("step_anatomy", "step_anatomy"),
    "safepoints": _step("step_anatomy", "safepoints"),
    "host_copies": _step("host_tier_copies", "host_copies"),
    "registration": _step("interference", "registration"),
    "aborted_steps": _step("aborts", "aborted_steps"),
    "between_processes": _step("process_copies", "between_processes"),
    "kernels_beside_copies": _step("interference", "kernels_beside_copies"),
    "pages": _step("page_reuse", "pages"),
    "vllm_copy_blocks": _step("host_tier_copies", "vllm_copy_blocks"),
}


def mechanisms(device: str) -> dict[str, dict[str, Any]]:
    """Run all steps in this process, one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for name, step in STEPS.items():
        before = joules()
        try:
            found[name] = dict(step(device))
        except Exception as error:  # noqa: BLE001  the other steps are worth having; the exit status says so
            traceback.print_exc()
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        if before is not None and (after := joules()) is not None:
            found[name]["joules"] = after - before
    return found
