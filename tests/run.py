"""Run the test suites: python -m tests.run fast slow engines

Every test shares the machine with others and with engines, so a failed test runs once more, alone and on
fleets of its own. A test that fails twice fails the run. A test that fails once and then passes is printed at
the end; tests/flaky.toml lists the tests that may do so, and how many others may in one run.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAKY_FILE = Path(__file__).with_name("flaky.toml")
ENTRY_LIFETIME = timedelta(days=30)
Suite = tuple[list[str], list[str]]  # arguments that select tests, and arguments that say how they run
# Tests without engines wait more than they compute, so several processes keep two cores busy. Tests on the
# shared fleet, and tests that start engines or fleets of one engine, run in two processes at the same time:
# the marks divide the tests so that both take about equally long.
PARALLEL, DURATIONS = ["-q", "--dist", "loadfile"], ["--durations", "30"]
SUITES: dict[str, list[Suite]] = {
    "fast": [(["-m", "not engine and not fleet and not slow"], [*PARALLEL, "-n", "3", *DURATIONS])],
    "slow": [(["-m", "slow and not engine and not fleet"], [*PARALLEL, "-n", "4", *DURATIONS])],
    "engines": [(["-m", "fleet"], DURATIONS), (["-m", "engine and not fleet"], DURATIONS)],
}
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class FlakyList:
    """The content of tests/flaky.toml."""

    ids: set[str]  # tests that may fail once
    max_unlisted: int  # how many other tests may fail once in one run
    errors: list[str]  # entries that are too old or give no reason


def read_flaky_list(file: Path, today: date) -> FlakyList:
    content = tomllib.loads(file.read_text())
    tests, others = content.get("test", []), content.get("others", [])
    entries = [(entry.get("id", "others"), entry) for entry in (*tests, *others)]
    errors = [
        f"{name}: on the list since {entry['since']}, longer than {ENTRY_LIFETIME.days} days"
        for name, entry in entries
        if today - entry["since"] > ENTRY_LIFETIME
    ]
    errors += [f"{name}: no reason" for name, entry in entries if not entry.get("reason")]
    return FlakyList({test["id"] for test in tests}, sum(entry["at_most"] for entry in others), errors)


def pytest(*arguments: str, cache: str, output: int | None = None) -> tuple[int, set[str]]:
    """Run pytest and return its exit status and the ids of the failed tests.

    Compiled modules are kept: otherwise each pytest process compiles all tests, and each fleet process all of
    the product.
    """
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    status = subprocess.run(command, check=False, env=environment, stdout=output, stderr=output).returncode
    failed = Path(cache, "v", "cache", "lastfailed")
    return status, set(json.loads(failed.read_text())) if failed.exists() else set()


def run_together(suites: list[Suite], caches: list[str]) -> list[tuple[int, set[str]]]:
    """Run suites at the same time and return the result of each.

    The first suite writes to our own output; the output of the others is printed when all have ended.
    """
    with ThreadPoolExecutor(len(suites)) as threads, ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile()) for _ in suites[1:]]
        outputs = [None, *(log.fileno() for log in logs)]
        running = [
            threads.submit(pytest, *selection, *options, cache=cache, output=output)
            for (selection, options), cache, output in zip(suites, caches, outputs, strict=True)
        ]
        results = [future.result() for future in running]
        for (selection, _), log in zip(suites[1:], logs, strict=True):
            log.seek(0)
            print(f"\n{' '.join(selection)}, at the same time:", flush=True)
            sys.stdout.write(log.read().decode(errors="replace"))
    return results


def run_with_retry(suites: list[Suite]) -> tuple[int, set[str]]:
    """Run suites together, then their failed tests alone.

    Returns the worst exit status, and the ids of the tests that failed once and then passed.
    """
    worst, failed_once = PASSED, set[str]()
    with ExitStack() as folders:
        caches = [folders.enter_context(tempfile.TemporaryDirectory(prefix="pytest-cache-")) for _ in suites]
        results = run_together(suites, caches)
        for (selection, _), cache, (status, failed) in zip(suites, caches, results, strict=True):
            if status == FAILED:
                print(f"\n{len(failed)} failed (above); once more, alone:", flush=True)
                retry = "--last-failed", "--last-failed-no-failures", "none"
                status, failed_again = pytest(*selection, *retry, cache=cache)
                failed_once |= failed - failed_again
            worst = worst or status
    return worst, failed_once


def run(groups: list[list[Suite]], flaky_file: Path, today: date) -> int:
    """Run groups of suites in order, and the suites of a group together; return the run's exit status."""
    flaky = read_flaky_list(flaky_file, today)
    failed_once: set[str] = set()
    status = PASSED
    for suites in groups:
        group_status, group_failed_once = run_with_retry(suites)
        status, failed_once = status or group_status, failed_once | group_failed_once
    if failed_once:
        print("\nfailed once and passed alone:")
        for test in sorted(failed_once):
            print(f"  {test}" + ("" if test in flaky.ids else f"   (not in {flaky_file.name})"))
    for line in flaky.errors:
        print(f"{flaky_file.name}: {line}")
    too_many = len(failed_once - flaky.ids) > flaky.max_unlisted
    return status or (FAILED if flaky.errors or too_many else PASSED)


if __name__ == "__main__":
    sys.exit(run([SUITES[name] for name in sys.argv[1:]], FLAKY_FILE, date.today()))
