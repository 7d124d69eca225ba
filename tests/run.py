"""Runner of the suites: python -m tests.run fast slow engines

What fails is run once more, alone and on fleets of its own, since every test shares the machine with others
and with engines. What fails twice fails. What failed once and passed alone is named at the end;
tests/flaky.toml is the list of those that may, and of how many others in a run: each is mended, or listed.
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
FLAKY = Path(__file__).with_name("flaky.toml")
LISTED_FOR = timedelta(days=30)
Suite = tuple[list[str], list[str]]  # which tests, and how they run
# Tests without engines wait more than they compute: several at a time keep two cores busy. So do those of a
# fleet and those that start engines themselves: they run at once, and share no engine.
QUIET, LONGEST = ["-q", "--dist", "loadfile"], ["--durations", "30"]
SUITES: dict[str, list[Suite]] = {
    "fast": [(["-m", "not engine and not fleet and not slow"], [*QUIET, "-n", "3", *LONGEST])],
    "slow": [(["-m", "slow and not engine and not fleet"], [*QUIET, "-n", "4", *LONGEST])],
    "engines": [(["-m", "fleet"], LONGEST), (["-m", "engine and not fleet"], LONGEST)],
}
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class FlakyList:
    ids: set[str]  # of tests that may fail once
    others: int  # how many more may, in a run
    wrong: list[str]  # with the list


def listed(file: Path, today: date) -> FlakyList:
    content = tomllib.loads(file.read_text())
    tests, others = content.get("test", []), content.get("others", [])
    entries = [(one.get("id", "others"), one) for one in (*tests, *others)]
    wrong = [
        f"{name}: on the list since {entry['since']}, longer than {LISTED_FOR.days} days"
        for name, entry in entries
        if today - entry["since"] > LISTED_FOR
    ]
    wrong += [f"{name}: no reason" for name, entry in entries if not entry.get("reason")]
    return FlakyList({test["id"] for test in tests}, sum(one["at_most"] for one in others), wrong)


def pytest(*arguments: str, cache: str, out: int | None = None) -> tuple[int, set[str]]:
    """Exit status, and the ids of what failed. Modules are kept compiled: else each worker compiles all
    tests, and each process of each fleet all of ours."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    status = subprocess.run(command, check=False, env=environment, stdout=out, stderr=out).returncode
    failed = Path(cache, "v", "cache", "lastfailed")
    return status, set(json.loads(failed.read_text())) if failed.exists() else set()


def at_once(suites: list[Suite], caches: list[str]) -> list[tuple[int, set[str]]]:
    """Of each its outcome. The first writes where we do, the others when all have ended."""
    with ThreadPoolExecutor(len(suites)) as threads, ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile()) for _ in suites[1:]]
        outs = [None, *(log.fileno() for log in logs)]
        running = [
            threads.submit(pytest, *which, *how, cache=cache, out=out)
            for (which, how), cache, out in zip(suites, caches, outs, strict=True)
        ]
        ended = [one.result() for one in running]
        for (which, _), log in zip(suites[1:], logs, strict=True):
            log.seek(0)
            print(f"\n{' '.join(which)}, at the same time:", flush=True)
            sys.stdout.write(log.read().decode(errors="replace"))
    return ended


def twice(suites: list[Suite]) -> tuple[int, set[str]]:
    """Exit status of suites that run at once, and the ids of what failed once and passed alone."""
    worst, once = PASSED, set[str]()
    with ExitStack() as folders:
        caches = [folders.enter_context(tempfile.TemporaryDirectory(prefix="pytest-cache-")) for _ in suites]
        ended = at_once(suites, caches)
        for (which, _), cache, (status, failed) in zip(suites, caches, ended, strict=True):
            if status == FAILED:
                print(f"\n{len(failed)} failed (above); once more, alone:", flush=True)
                of_these = "--last-failed", "--last-failed-no-failures", "none"
                status, again = pytest(*which, *of_these, cache=cache)
                once |= failed - again
            worst = worst or status
    return worst, once


def run(turns: list[list[Suite]], flaky: Path, today: date) -> int:
    """`turns`: one after the other, each of suites that run at once."""
    allowed = listed(flaky, today)
    once: set[str] = set()
    status = PASSED
    for suites in turns:
        failed, more = twice(suites)
        status, once = status or failed, once | more
    if once:
        print("\nfailed once and passed alone:")
        for test in sorted(once):
            print(f"  {test}" + ("" if test in allowed.ids else f"   (not in {flaky.name})"))
    for line in allowed.wrong:
        print(f"{flaky.name}: {line}")
    return status or (FAILED if allowed.wrong or len(once - allowed.ids) > allowed.others else PASSED)


if __name__ == "__main__":
    sys.exit(run([SUITES[name] for name in sys.argv[1:]], FLAKY, date.today()))
