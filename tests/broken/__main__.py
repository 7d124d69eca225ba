"""What reviews found, broken again one at a time in a copy of the tree: tests named beside it have to fail.

    python -m tests.broken [WORD ...]

Of a list (`tests/broken/*.toml`) all entries whose `what` has one of the words, or all there are. It shows
that no test named there passes whatever the code does; `tests/test_broken.py` holds the lists to the code.
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
PASSED, FAILED = 0, 1  # pytest's status; others mean that none ran


@dataclass(frozen=True)
class Finding:
    what: str
    file: str
    was: str
    broken: str
    tests: tuple[str, ...]


def findings(lists: list[Path]) -> list[Finding]:
    entries = [entry for file in lists for entry in tomllib.loads(file.read_text())["finding"]]
    return [Finding(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copied(into: Path) -> None:
    """What git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(ROOT / name, into / name)


def status_of(tests: tuple[str, ...], tree: Path) -> int | None:
    """pytest's; None: it takes too long, which on a busy machine says nothing of the tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return ran.returncode


def is_noticed(finding: Finding, tree: Path) -> bool:
    file = tree / finding.file
    whole = file.read_text()
    file.write_text(whole.replace(finding.was, finding.broken))
    try:
        return status_of(finding.tests, tree) == FAILED
    finally:
        file.write_text(whole)


def main(words: list[str]) -> int:
    wanted = [one for one in findings(LISTS) if not words or any(word in one.what for word in words)]
    unnoticed = []
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        copied(Path(folder))
        files = dict.fromkeys(test for finding in wanted for test in finding.tests)
        if (status := status_of(tuple(files), Path(folder))) != PASSED:
            print(f"the tests do not pass as it is (status {status}): nothing can be said")
            return 2
        for finding in wanted:
            red = is_noticed(finding, Path(folder))
            print(f"{'red ' if red else 'GREEN'} {finding.what} ({finding.file})", flush=True)
            if not red:
                unnoticed.append(finding)
    print(f"{len(wanted) - len(unnoticed)} of {len(wanted)} are noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.broken", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="of findings' descriptions (default: all)")
    sys.exit(main(parser.parse_args().words))
