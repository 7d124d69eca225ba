"""Runs one step of `benchmarks.gpu` here: python -m benchmarks.gpu.step NAME --device cuda --out FILE"""

import argparse
import asyncio
import importlib
import os
from pathlib import Path

from benchmarks.gpu.results import Figures, ResultLog
from benchmarks.gpu.runner import SEQUENCE, TOGETHER, TORCH, Step


def torch_step(step: Step, device: str) -> Figures:
    """Run a step of the group `torch`. Its module is imported only now: a broken one fails no other step."""
    found: Figures = getattr(importlib.import_module(f"benchmarks.gpu.{step.module}"), step.name)(device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    log = ResultLog(options.out, options.name)
    # vLLM forks its engine: this process must not initialise CUDA before that.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    step = next(step for step in SEQUENCE if step.name == options.name)
    if step.group == TORCH:
        log.add(torch_step(step, options.device))
    elif step.group == TOGETHER:
        from benchmarks.gpu.together import measure_together

        measure_together(options.device, options.out)
    else:
        from benchmarks.gpu.engines import measure_engine

        asyncio.run(measure_engine(options.name, options.device, log))


if __name__ == "__main__":
    main()
