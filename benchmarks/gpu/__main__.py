"""Measure on a GPU what the product's mechanisms cost, and how its engines compare with plain vLLM.

    python -m benchmarks.gpu [--only STEP,...] [--skip STEP,...] [--limit S] [--out FILE]

Every step runs in a process of its own with a time limit, and appends its figures to `--out` as JSON lines
as soon as they are known: a run that is cut off loses nothing that was measured. Steps of the group `torch`
need torch alone. Steps of the group `engines` start vLLM with a model of Qwen3 8B's sizes and random
weights, one engine at a time, with 0.85 of the GPU's memory. Without CUDA the steps run on the CPU with
small sizes, which shows only that they run. `--list` prints the steps.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.results import compare_with_plain, failed_steps, page, read_results
from benchmarks.gpu.runner import SEQUENCE, StepSelectionError, run_step, select
from benchmarks.harness.output import command, write_json
from benchmarks.harness.standalone_engine import on_cuda

CPU_LIMITS = 3  # factor on limits without a GPU: an engine takes minutes to start on busy cores


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def machine_name(device: str) -> str:
    import torch

    if device == "cpu":
        return "a machine without CUDA, with small sizes"
    from workers.power.nvml import Gpus

    with Gpus() as gpus:
        return f"{gpus.all()[0].name}, torch {torch.__version__}"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--only", type=names, default=[], help="steps or groups to run")
    parser.add_argument("--skip", type=names, default=[], help="steps or groups to leave out")
    parser.add_argument("--limit", type=float, help="seconds that a step may take, instead of its own limit")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append each step's figures as JSON lines")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    arguments = parser.parse_args()
    if arguments.list:
        for step in SEQUENCE:
            print(f"{step.name:24}{step.group:10}{step.limit_s:.0f} s")
        return
    try:
        steps = select(arguments.only, arguments.skip)
    except StepSelectionError as wrong:
        sys.exit(str(wrong))
    device = "cuda" if on_cuda() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder, "results.jsonl")
        for step in steps:
            limit_s = step.limit_s if device == "cuda" else CPU_LIMITS * step.limit_s
            run_step(step, arguments.limit or limit_s, device, out, Path(folder, "vllm"))
        found = read_results(out)
    compare_with_plain(found)
    machine = machine_name(device)
    write_json(arguments.json, {"machine": machine, **found})
    print(page(machine, found, device))
    failed = [name for name in failed_steps(found) if name in {step.name for step in steps}]
    sys.exit(f"not as expected: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
