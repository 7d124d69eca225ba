"""The simulation holds its invariants, replays exactly, and finds deliberate bugs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SEEDS = 100
# Each found a fault of the product or of the simulation, as the commit that names it says. A change of the
# simulation changes what a seed does; the deliberate bugs are what keeps a fault found.
FOUND = "110", "134", "157", "1066", "1426", "3011"  # 13 and 34 are among the first hundred


def simulated(folder: Path, *options: str) -> tuple[int, str, Any]:
    """Run the command; return its status, its output and its results."""
    results = folder / "results.json"
    command = [sys.executable, "-m", "tests.simulated", *options, "--json", str(results)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=580)
    return done.returncode, done.stdout + done.stderr, json.loads(results.read_bytes())


@pytest.mark.slow
def test_no_seed_breaks_an_invariant_and_each_replays(tmp_path: Path) -> None:
    status, output, results = simulated(tmp_path, "--seeds", str(SEEDS))
    assert (status, results["violations"]) == (0, 0), output
    counts = results["counts"]
    assert counts["answers 200"] > 10 * SEEDS  # the runs did something
    assert counts["crash_soon"] + counts["lose_power"] > SEEDS
    traces = {one["seed"]: one["trace"] for one in results["results"]}
    for first in (0, SEEDS - 2):
        _, _, again = simulated(tmp_path, "--first", str(first), "--seeds", "2")
        assert {one["seed"]: one["trace"] for one in again["results"]} == {
            seed: traces[seed] for seed in (first, first + 1)
        }


@pytest.mark.slow
def test_seeds_that_once_found_a_fault_break_no_invariant(tmp_path: Path) -> None:
    status, output, results = simulated(tmp_path, "--only", *FOUND)
    assert (status, results["violations"], results["seeds"]) == (0, 0, len(FOUND)), output


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [
        "answer_before_journal",
        "epoch_ignored_by_directory",
        "epoch_ignored_by_gateway",
        "report_taken_twice",
        "reservation_leaked",
    ],
)
def test_a_deliberate_bug_is_found(tmp_path: Path, bug: str) -> None:
    status, output, results = simulated(tmp_path, "--bug", bug, "--seeds", "60")
    assert (status, bool(results["violations"])) == (1, True), output
    assert "TypeError" not in output, "the bug itself fails, instead of breaking an invariant"
