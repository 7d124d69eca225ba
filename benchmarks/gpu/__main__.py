"""What only a GPU can show.

    python -m benchmarks.gpu [--mechanisms | --engines] [--page FILE] [--json FILE]

--mechanisms needs torch and no vLLM: eight prompts through staging windows, blocks to the host and back,
kernels beside copies, a load behind kernels that an abort left, the fence between graph pieces and the time
from signal to abort, parameters whose pages become KV and come back, energy as the driver counts it.
Bandwidths stand beside plain copies of the same run; bytes are compared. --engines needs vLLM: a model of
real size with random weights, plain and with ours, on this GPU. Without an option both run. Without CUDA the
doubles run on the CPU, and engines of the small model, which the page says.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.mechanisms import mechanisms
from benchmarks.output import command, write_json

WITHOUT = (
    "a machine without CUDA: the mechanisms' doubles ran on its CPU,\nwhere a copy is done when it has been "
    "called. Times and bandwidths would say nothing of a GPU, and are left out"
)


def page(machine: str, found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# What a GPU shows",
        "",
        f"`python -m benchmarks.gpu`, on {machine}.",
        "Bandwidths are GB/s, the best of the run's rounds.",
        "",
        "| | | |",
        "|---|---|---|",
    ]
    for part, figures in found.items():
        lines.append(f"| **{part}** | {figures.get('failed', 'ran')} | |")
        for name, value in figures.items():
            if isinstance(value, bool | int) or (machine != WITHOUT and isinstance(value, float)):
                shown = f"{value:.4g}" if isinstance(value, float) else str(value)
                lines.append(f"| {part} | {name} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command(__doc__)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--mechanisms", action="store_true", help="what needs torch and no vLLM")
    parts.add_argument("--engines", action="store_true", help="what needs vLLM")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page to write")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if device == "cuda" else WITHOUT
    found = {} if arguments.engines else mechanisms(device)
    if not arguments.mechanisms:
        from benchmarks.gpu.engines import measure_engines

        found |= measure_engines(device)
    text = page(machine, found)
    if arguments.page:
        arguments.page.write_text(text)
    write_json(arguments.json, {"machine": machine, **found})
    print(text)
    wrong = [name for name, figures in found.items() if "failed" in figures or figures.get("equal") is False]
    sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
