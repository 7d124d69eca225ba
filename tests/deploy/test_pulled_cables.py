"""Hosts of a fleet lose sight of each other, one way or both ways, and find each other again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cables import apart

pytestmark = pytest.mark.slow

PULLED_S = 3.0
ANSWERED_S = 15.0  # after a cable is plugged in again, every client is answered within this time
GONE_S = 30.0  # keep-alive, the lease and one look


def test_a_pulled_cable_costs_its_own_clients_a_wait_and_nobody_an_answer(tmp_path: Path) -> None:
    prefix = apart()
    if prefix is None:
        pytest.skip("this machine allows no network namespaces (or has no `ip` and `unshare`)")
    command = [*prefix, sys.executable, "-m", "tests.support.cabled_fleet", str(PULLED_S), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    logs = "\n".join(file.read_text()[-2000:] for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    found = json.loads(done.stdout)
    print(done.stdout)
    assert len(found["rows"]) == 9
    for row in found["rows"]:
        assert row["recovered_s"] < ANSWERED_S, row
        assert max(row["waits_s"].values()) < PULLED_S + ANSWERED_S, row
        if "head" in row["cable"]:  # turns and streams need neither the directory nor its view of engines
            assert row["waits_s"]["bound"] < PULLED_S and row["waits_s"]["stream"] < PULLED_S, row
            assert not row["failures"], row
    assert set(found["decoders"].values()) == {"d0", "d1"}
    assert found["silenced"]["gone_s"] < GONE_S
    assert found["silenced"]["decoder"] == "d0"  # it came back in its epoch, and with nothing to do
    assert (found["left"], found["ended"]) == ([], [])
