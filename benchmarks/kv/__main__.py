"""Keeping, parking and restoring conversations against plain vLLM: `python -m benchmarks.kv`.

Agent conversations on one decoder whose accelerator holds a third of what lives at once: how many prompt
tokens are computed again, and how long later turns wait for their first token, beside plain vLLM in the same
run; then the same while offline work fills the decoder. Answers must be equal, token for token. Then
restoring a prompt from the host against computing it, from 1k tokens up, and what restores do to the token
times of a request that decodes meanwhile. In the end everything is released; what is left counts. Before all
that, copies by themselves: to the host and back beside a plain copy, and a transfer through a staging window
beside one in place.

In full about ten minutes on two quiet cores.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.output import command, write_json
from benchmarks.kv.measure import FULL, QUICK, measure


def show(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if not isinstance(value, dict):
            print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    if "with_offline" in found:
        print("\nwith offline work")
        for name, value in found["with_offline"].items():
            print(f"  {name:30} {value:.4g}" if isinstance(value, float) else f"  {name:30} {value}")
    if "restore" not in found:
        return
    print("\nbeside restores: " + ", ".join(f"{k} {v:.4g}" for k, v in found["restore"]["beside"].items()))
    print(
        f"\n{'tokens':>8} {'restore s':>10} {'tokens/s':>9} {'compute s':>10} {'tokens/s':>9} {'faster':>8}"
    )
    for row in found["restore"]["by_length"]:
        restore = f"{row['restore_s']:10.3f} {row['restore_tokens_per_s']:9.0f}"
        compute = f"{row['recompute_s']:10.3f} {row['recompute_tokens_per_s']:9.0f}"
        print(f"{row['tokens']:8} {restore} {compute} {row['restore_vs_recompute']:7.1f}x")


def main() -> None:
    parser = command(__doc__, quick="a small load, for a check")
    parser.add_argument("--trace", type=Path, help="conversations to take instead of the sample's")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    if arguments.trace:
        plan = replace(plan, load=replace(plan.load, trace=arguments.trace))

    def tell(found: dict[str, Any]) -> None:
        print(f"\nafter {time.monotonic() - began:.0f} s", flush=True)
        show(found)
        write_json(arguments.json, found)

    began = time.monotonic()
    tell(measure(plan, tell))


if __name__ == "__main__":
    main()
