"""Time per token with a simulated device: is the host's work hidden behind the device's work?

    python -m benchmarks.coserving.overlap [--quick] [--json FILE]

vLLM's engine core, scheduler and model runner run with a model that computes nothing and a clock in place of
the device (device_clock.py). If the host is slower than the device, or waits for it, the time per token is
longer. Each variant has a process. Variants alternate in short rounds. A ratio compares a variant's median
with plain vLLM's median of the same round. Variants named `_sync` do not use asynchronous scheduling. Host
times are CPU time, which other processes of the machine disturb less.
"""

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.coserving.device_clock import PARTS, TBT_TARGET_S, WAIT, ClockedEngine, ClockedVariant
from benchmarks.harness.output import command, print_rows, quantile, report
from benchmarks.harness.rounds import rotated
from kvtransfer.parent_death import die_with_parent

VARIANTS = {
    "plain": ClockedVariant(),
    "plain_sync": ClockedVariant(overlaps=False),
    "kept": ClockedVariant(keeps=True),
    "idle": ClockedVariant(coserves=True),
    "idle_sync": ClockedVariant(coserves=True, overlaps=False),
    "decodes": ClockedVariant(coserves=True, offline_decodes=True),
    "prompts": ClockedVariant(coserves=True, offline_prompts=True),
}
DEVICE_S = {1: 4.6e-3, 16: 5.3e-3, 64: 6.4e-3}  # a step of Qwen3 8B on an H200, by number of requests
OTHER_DEVICE_S = 10e-3
TOKENS, PROMPTS_TOKENS = 23, 8  # in a round; fewer beside offline prompts
LIMIT_S = 300.0  # longest start of an engine, and longest round
STOP, STOP_S = ("stop",), 10.0  # an engine that stops by itself removes its shared memory

Round = Mapping[str, Mapping[str, Any]]  # what each variant's engine measured


def serve_engine(name: str, most: int, pipe: Connection) -> None:
    """Run a variant's engine, and call the methods that the parent process names, until it sends `STOP`."""
    die_with_parent()
    with tempfile.TemporaryDirectory() as folder:
        engine = ClockedEngine(VARIANTS[name], Path(folder), most)
        pipe.send("started")
        while (call := pipe.recv()) != STOP:
            method, *arguments = call
            pipe.send(getattr(engine, method)(*arguments))
        engine.stop()


@contextmanager
def engines(names: Sequence[str], most: int) -> Iterator[dict[str, Connection]]:
    """Start an engine of each variant in a fork of this process."""
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",  # a GPU's host starts no threads for the little that it computes
    }
    warnings.simplefilter("ignore", FutureWarning)  # torch emits such warnings
    import vllm.v1.engine.core  # noqa: F401  once, for all forks

    fork = multiprocessing.get_context("fork")
    pipes: dict[str, Connection] = {}
    children = []
    try:
        for name in names:
            pipes[name], theirs = fork.Pipe()
            children.append(fork.Process(target=serve_engine, args=(name, most, theirs), daemon=True))
            children[-1].start()
            theirs.close()
            answer(name, pipes[name])
        yield pipes
    finally:
        for pipe in pipes.values():
            with suppress(OSError):
                pipe.send(STOP)
        for child in children:
            child.join(STOP_S)
            child.kill()
            child.join()


def answer(name: str, pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise SystemExit(f"the engine {name} has not answered for {LIMIT_S:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"the engine {name} ended; its error is above") from None


def measure(names: Sequence[str], counts: Sequence[int], rounds: int, tokens: int) -> dict[int, list[Round]]:
    """Return the rounds of all variants, by number of requests."""
    found: dict[int, list[Round]] = {}
    lengths = {name: min(tokens, PROMPTS_TOKENS) if name == "prompts" else tokens for name in names}
    with engines(names, max(counts)) as pipes:

        def ask(name: str, *call: Any) -> Any:
            pipes[name].send(call)
            return answer(name, pipes[name])

        for requests in counts:
            for name in names:
                ask(name, "begin", requests, DEVICE_S.get(requests, OTHER_DEVICE_S))
            found[requests] = [
                {name: ask(name, "play", lengths[name]) for name in rotated(names, number)}
                for number in range(rounds)
            ]
    return found


def rows_of(requests: int, rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return a row for each variant. Times are in ms; host times are CPU time."""
    rows = []
    for name in (one for one in VARIANTS if one in rounds[0]):
        played = [one[name] for one in rounds]
        ratios = [median(one[name]["gaps"]) / median(one["plain"]["gaps"]) for one in rounds]
        host = [median(one[name]["host"]) / median(one["plain"]["host"]) for one in rounds]
        gaps = [gap for one in played for gap in one["gaps"]]
        rows.append(
            {
                "variant": name,
                "requests": requests,
                "device": mean(one["device"] for one in played),
                "token": median(gaps),
                "token_mean": mean(gaps),
                "token_p99": quantile(gaps, 0.99),
                "vs_plain": median(ratios),
                "low": quantile(ratios, 0.25),
                "high": quantile(ratios, 0.75),
                "host": median(one for each in played for one in each["host"]),
                "host_vs_plain": median(host),
                **{part: median(one[part] for one in played) for part in (*PARTS, WAIT)},
            }
        )
    return rows


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each variant's ratios to plain vLLM: one for each number of requests, and the greatest."""
    named: dict[str, float] = {}
    for name in (one for one in VARIANTS if one != "plain"):
        for figure in ("vs_plain", "host_vs_plain"):
            own = {row["requests"]: row[figure] for row in rows if row["variant"] == name}
            if own and name != "prompts":
                named[f"{name}_{figure}"] = max(own.values())
                named |= {f"{name}_{figure}_{requests}": ratio for requests, ratio in own.items()}
    prompts = [row for row in rows if row["variant"] == "prompts"]
    if prompts:
        named["prompts_vs_target"] = max(row["token"] / (1e3 * TBT_TARGET_S) for row in prompts)
        named["prompts_vs_device"] = max(row["token_mean"] / row["device"] for row in prompts)
    return named


def main() -> None:
    parser = command(__doc__, quick="16 requests, 3 rounds: a minute")
    parser.add_argument("--requests", type=int, nargs="+", help="numbers of requests", default=[*DEVICE_S])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    counts, rounds = ((16,), 3) if options.quick else (options.requests, options.rounds)
    found = measure(tuple(VARIANTS), counts, rounds, TOKENS)
    rows = [row for requests, played in found.items() for row in rows_of(requests, played)]
    print_rows("ms per token, and parts of a step", rows)
    slow = [row["requests"] for row in rows if row["variant"] == "plain" and row["host"] > row["device"]]
    if slow:
        print(f"even plain vLLM's host is slower than the device with {slow} requests")
    report(options.json, figures(rows), rows=rows)


if __name__ == "__main__":
    main()
