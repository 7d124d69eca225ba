"""Steps that need torch and no vLLM: each takes a device, "cuda" or "cpu", and returns figures."""

import importlib
from collections.abc import Callable

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
