"""Put faults that reviews found back into a copy of the tree, one at a time, and check that the named tests
fail.

    python -m tests.broken [WORD ...]

Each entry of the lists (`tests/broken/*.toml`) is a fault and the tests that find it. WORDs select entries by
`what`; without one all are tried. If the tests of an entry stay green, they do not find its fault.
`tests/test_broken.py` checks that each entry still fits the code.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from shutil import copy2

ROOT = Path(__file__).parents[2]
LISTS = sorted(Path(__file__).parent.glob("*.toml"))
LIMIT_S = 900
PASSED, FAILED = 0, 1  # exit statuses of pytest; with any other, no test ran


@dataclass(frozen=True)
class Finding:
    """One fault: `was` is replaced by `broken` in `file`, and one of `tests` has to fail."""

    what: str
    file: str
    was: str
    broken: str
    tests: tuple[str, ...]


def findings(lists: list[Path]) -> list[Finding]:
    entries = [entry for file in lists for entry in tomllib.loads(file.read_text())["finding"]]
    return [Finding(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(into: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(ROOT / name, into / name)


def status_of(tests: tuple[str, ...], tree: Path) -> int | None:
    """Return the exit status of pytest, or None after LIMIT_S, which proves nothing on a busy machine."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return ran.returncode


def is_detected(finding: Finding, tree: Path) -> bool:
    file = tree / finding.file
    whole = file.read_text()
    file.write_text(whole.replace(finding.was, finding.broken))
    try:
        return status_of(finding.tests, tree) == FAILED
    finally:
        file.write_text(whole)


def main(words: list[str]) -> int:
    wanted = [one for one in findings(LISTS) if not words or any(word in one.what for word in words)]
    missed = []
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        copy_tree(Path(folder))
        files = dict.fromkeys(test for finding in wanted for test in finding.tests)
        if (status := status_of(tuple(files), Path(folder))) != PASSED:
            print(f"the tests fail in the unchanged tree (status {status}), so they show nothing")
            return 2
        for finding in wanted:
            red = is_detected(finding, Path(folder))
            print(f"{'red ' if red else 'GREEN'} {finding.what} ({finding.file})", flush=True)
            if not red:
                missed.append(finding)
    print(f"{len(wanted) - len(missed)} of {len(wanted)} are noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.broken", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="word in the description of a finding (default: all findings)",
    )
    sys.exit(main(parser.parse_args().words))
