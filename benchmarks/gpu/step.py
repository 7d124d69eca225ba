"""Runs one GPU step in this process: python -m benchmarks.gpu.step NAME --device cuda --out FILE"""

import argparse
import asyncio
import os
from pathlib import Path

from benchmarks.gpu.results import ResultLog
from benchmarks.gpu.runner import SEQUENCE, TOGETHER, TORCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    log = ResultLog(arguments.out, arguments.name)
    # vLLM forks its engine: this process must not initialise CUDA before that.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    group = next(step.group for step in SEQUENCE if step.name == arguments.name)
    if group == TORCH:
        from benchmarks.gpu.mechanisms import STEPS

        log.add(STEPS[arguments.name](arguments.device))
        return
    if group == TOGETHER:
        from benchmarks.gpu.together import measure_together

        measure_together(arguments.device, arguments.out)
        return
    from benchmarks.gpu.engines import measure_engine

    asyncio.run(measure_engine(arguments.name, arguments.device, log))


if __name__ == "__main__":
    main()
