"""Command line of the simulation: runs each seed in its own process, and reports the findings."""

import argparse
import json
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.simulated import bugs, world
from tests.simulated.world import RunResult

BUG_SEEDS = 200  # number of seeds within which each deliberate bug must be found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one; `--seeds 1 --first N` replays N")
    parser.add_argument("--only", type=int, nargs="+", help="run these seeds")
    parser.add_argument(
        "--bug", choices=sorted(bugs.BUGS), help="break the product by this deliberate bug, until it is found"
    )
    parser.add_argument("--bugs", action="store_true", help="print the seed that finds each deliberate bug")
    parser.add_argument("--json", type=Path, help="file for the results of all seeds")
    parser.add_argument("--log", action="store_true", help="print the log lines of all processes")
    options = parser.parse_args()
    world.prepare()
    if options.log:
        logging.disable(logging.NOTSET)
        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", force=True)
    if options.bugs:
        return _find_bugs(options.json)
    seeds = options.only or range(options.first, options.first + options.seeds)
    results = []
    for result in _run_all(seeds, options.bug):
        results.append(result)
        if result.violations:
            print(f"seed {result.seed}: {result.violations[0]}", flush=True)
            if options.bug is not None:  # found
                break
    _report(results, options.json)
    return 1 if any(result.violations for result in results) else 0


def _run_all(seeds: Sequence[int], bug: str | None) -> Iterator[RunResult]:
    """Run seeds, each in a fresh copy of this process, so that no run depends on earlier ones."""
    context = multiprocessing.get_context("fork")
    with context.Pool(min(os.cpu_count() or 1, len(seeds)), maxtasksperchild=1) as pool:
        yield from pool.imap(_run, [(seed, bug) for seed in seeds])


def _run(job: tuple[int, str | None]) -> RunResult:
    seed, bug = job
    if bug is not None:
        bugs.BUGS[bug]()
    return world.run(seed)


def _report(results: list[RunResult], file: Path | None) -> None:
    failed = sum(bool(result.violations) for result in results)
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.counts)
    steps = sum(result.steps for result in results)
    virtual_s = sum(result.virtual_s for result in results)
    print(f"violations {failed}, seeds {len(results)}, steps {steps}, virtual seconds {virtual_s:.0f}")
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    if len(results) == 1:
        print(f"trace {results[0].trace:08x}")
    if file is not None:
        summary = {"violations": failed, "seeds": len(results), "steps": steps, "virtual_s": virtual_s}
        rows = [asdict(result) for result in results]
        file.write_text(json.dumps({**summary, "counts": counts, "results": rows}, indent=1))


def _find_bugs(file: Path | None) -> int:
    found: dict[str, int | None] = {}
    for name in sorted(bugs.BUGS):
        found[name] = None
        for result in _run_all(range(BUG_SEEDS), name):
            if result.violations:
                found[name] = result.seed
                print(f"{name}: seed {result.seed}: {result.violations[0]}", flush=True)
                break
        else:
            print(f"{name}: not found within {BUG_SEEDS} seeds", flush=True)
    if file is not None:
        file.write_text(json.dumps(found, indent=1))
    return 0 if None not in found.values() else 1
