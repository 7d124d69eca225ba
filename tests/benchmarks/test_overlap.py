"""Steps of the overlap benchmark end when the clock of its simulated device says so."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.coserving import overlap
from benchmarks.harness.fleet import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

MEASURE = """
import json
from benchmarks.coserving.overlap import measure
print("found", json.dumps(measure(("plain", "decodes", "prompts"), (2,), 1, 24)[2][0]))
"""


@pytest.mark.engine
def test_a_step_lasts_as_long_as_its_simulated_device_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    found = json.loads(done.stdout.rpartition("found ")[2])
    rows = {row["variant"]: row for row in overlap.rows_of(2, [found])}
    assert rows["plain"]["device"] == pytest.approx(10)
    assert rows["decodes"]["device"] == pytest.approx(10)
    assert rows["prompts"]["device"] > 20
    for name, row in rows.items():
        assert row["token_mean"] > 9, name  # less than 10, because a late first token shortens the mean
        assert row["host"] > 0 and row["schedule"] > 0 and row["prepare"] > 0, name
    assert set(overlap.figures(list(rows.values()))) == {
        *("decodes_vs_plain", "decodes_vs_plain_2", "decodes_host_vs_plain", "decodes_host_vs_plain_2"),
        *("prompts_vs_target", "prompts_vs_device"),
    }
