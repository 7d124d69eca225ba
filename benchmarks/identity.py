"""What it costs to know a request's conversation: parse, chain of hashes, look-up.

python -m benchmarks.identity [--quick] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from router import chains
from router.identity import NodeTable

SIZES = {"10_kib": (10, 20), "198_kib": (198, 200), "787_kib": (787, 400)}
SEED = chains.seed("space", "model")


def body_of(kib: int, messages: int) -> bytes:
    """Half of the messages as agents write them: tool calls and their results."""
    size = kib * 1024 // messages
    made: list[dict[str, Any]] = []
    for number in range(messages):
        text = f"{number} " + "x" * size
        if number % 4 == 2:
            call = {"name": "run", "arguments": orjson.dumps({"command": text}).decode()}
            made.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
                }
            )
        elif number % 4 == 3:
            made.append({"role": "tool", "tool_call_id": f"c{number - 1}", "content": text})
        else:
            made.append({"role": "user", "content": text})
    return orjson.dumps({"model": "m", "messages": made})


def microseconds(work: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


def measure(repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    table = NodeTable(500_000)
    for number in range(100_000):
        table.record(chains.of_messages(SEED, [{"role": "user", "content": str(number)}]).end, str(number))
    for name, (kib, messages) in SIZES.items():
        raw = body_of(kib, messages)
        body = orjson.loads(raw)
        known = chains.of_body(SEED, {"messages": body["messages"][:-2]})
        table.record(known.end, name)
        whole = chains.of_body(SEED, body)
        figures[f"parse_{name}_us"] = microseconds(partial(orjson.loads, raw), repeats)
        figures[f"chain_{name}_us"] = microseconds(partial(chains.of_body, SEED, body), repeats)
        figures[f"find_{name}_us"] = microseconds(partial(table.find, whole), repeats)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(200 if options.quick else 2000)
    print(f"{'body':>10} {'parse':>10} {'chain':>10} {'find':>10}   (µs, median)")
    for name in SIZES:
        row = [figures[f"{part}_{name}_us"] for part in ("parse", "chain", "find")]
        print(f"{name:>10} " + " ".join(f"{value:10.1f}" for value in row))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
