"""Retention, parking and restores of KV beside plain vLLM.

    python -m benchmarks.kv [--quick] [--json FILE] [--trace FILE]

First, copies are measured by themselves: to the host, to the disk and back, and over a connection. Then agent
conversations run on one decoder whose accelerator holds a third of their KV, and on plain vLLM, alone and
while offline work fills the decoder. Figures are the prompt tokens that are computed again, and how long
later turns wait for their first token. Answers must be equal, token for token. At the end all conversations
are released, and blocks that are still held are counted. Then restores of prompts from the host are compared
with computing them, and measured beside a request that decodes. Last, agents talk to a fleet of three
decoders while one is drained: no token of their context may be computed again, and no stream may be cut.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.output import command, print_figures, print_rows, write_json
from benchmarks.kv.conversations import HOST_KV_GIB, LoadShape, Played, compared, in_a_process, play_load
from benchmarks.kv.copies import KvSize, measure_copies
from benchmarks.kv.disk import disk_copies
from benchmarks.kv.drain import drain_under_load
from benchmarks.kv.restore import restore_against_recompute
from deploy.small_model import make_model

LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32000), (1024, 8192)
QUICK_LOAD = LoadShape(
    conversations=12, lengths=1 / 64, turns=3, context=1500, arrivals_s=2.0, longest_wait_s=0.5
)


def measure(load: LoadShape, quick: bool, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return all figures; call `report` with the figures known so far after each part."""
    model = Path(tempfile.gettempdir()) / "conserve-benchmark-model"
    make_model(model)
    copies = {**measure_copies(KvSize()), **disk_copies(KvSize())}
    ours: Played = in_a_process(play_load, model, load, True, False)
    plain: Played = in_a_process(play_load, model, load, False, False)
    found = {**compared(plain, ours), **copies}
    report(found)
    lengths = QUICK_LENGTHS if quick else LENGTHS
    restore = in_a_process(restore_against_recompute, model, lengths, HOST_KV_GIB)
    rows, beside = restore["by_length"], restore["beside"]
    found |= {
        "restore_vs_recompute_8k": next(r["restore_vs_recompute"] for r in rows if r["tokens"] == 8192),
        "break_even_tokens": min((r["tokens"] for r in rows if r["restore_vs_recompute"] > 1), default=None),
        **{name: beside[name] for name in beside if name.startswith("tbt_change")},
        "restore": restore,
    }
    if not quick:  # the baseline is plain vLLM without offline work: with it, vLLM recomputes more
        report(found)
        full: Played = in_a_process(play_load, model, load, True, True)
        found["with_offline"] = compared(plain, full)
        found["recomputed_vs_vllm_with_offline"] = found["with_offline"]["recomputed_vs_vllm"]
        found["leaked_blocks"] += full.faults
    report(found)
    return found | drain_under_load(quick)


def main() -> None:
    parser = command(__doc__, quick="a small load, for a check")
    parser.add_argument("--trace", type=Path, help="conversations to play (default: the sample)")
    options = parser.parse_args()
    load, began = QUICK_LOAD if options.quick else LoadShape(), time.monotonic()
    if options.trace:
        load = replace(load, trace=options.trace)

    def report(found: dict[str, Any]) -> None:
        print(f"\nafter {time.monotonic() - began:.0f} s", flush=True)
        print_figures({name: value for name, value in found.items() if not isinstance(value, dict)})
        if "with_offline" in found:
            print("\nwith offline work")
            print_figures(found["with_offline"])
        if "restore" in found:
            print_rows("restores", found["restore"]["by_length"])
            print_rows("beside a request that decodes", [found["restore"]["beside"]])
        write_json(options.json, found)

    report(measure(load, options.quick, report))


if __name__ == "__main__":
    main()
