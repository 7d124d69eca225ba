"""Simulated runs keep the invariants and replay exactly, and deliberate bugs are found."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

SEEDS = 100


def simulated(folder: Path, *options: str) -> tuple[int, str, Any]:
    """Run the simulation's command with `options`; return its status, its output and its results."""
    results = folder / "results.json"
    command = [sys.executable, "-m", "tests.simulated", *options, "--json", str(results)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=580)
    return done.returncode, done.stdout + done.stderr, json.loads(results.read_bytes())


@pytest.mark.slow
def test_each_seed_keeps_the_invariants_and_replays_the_same_trace(tmp_path: Path) -> None:
    status, output, results = simulated(tmp_path, "--seeds", str(SEEDS))
    assert (status, results["violations"]) == (0, 0), output
    counts = results["counts"]
    assert counts["answers 200"] > 10 * SEEDS  # the runs did something
    assert counts["batches"] > SEEDS // 10
    assert counts["crash_soon"] + counts["lose_power"] > SEEDS
    traces = {one["seed"]: one["trace"] for one in results["results"]}
    for first in (0, SEEDS - 2):
        _, _, again = simulated(tmp_path, "--first", str(first), "--seeds", "2")
        assert {one["seed"]: one["trace"] for one in again["results"]} == {
            seed: traces[seed] for seed in (first, first + 1)
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "seeds"),
    [
        ("answer_before_journal", range(200)),
        ("binding_told_before_journal", [26]),
        ("epoch_ignored_by_directory", [26]),
        ("epoch_ignored_by_gateway", [25]),
        ("known_binding_kept", [41]),
        ("leased_lines_lost", [1]),
        ("report_taken_twice", range(200)),
        ("reports_forgotten_in_silence", [72]),
        ("requests_elsewhere_ignored", [7]),
        ("reservation_leaked", range(200)),
        ("results_not_synced", [1]),
        ("tokens_elsewhere_ignored", [8]),
        ("turns_elsewhere_ignored", [7]),
    ],
)
def test_the_simulation_finds_each_deliberate_bug(tmp_path: Path, bug: str, seeds: Iterable[int]) -> None:
    status, output, results = simulated(tmp_path, "--bug", bug, "--only", *map(str, seeds))
    assert (status, bool(results["violations"])) == (1, True), output
    assert "TypeError" not in output, "the bug itself fails, instead of breaking an invariant"
