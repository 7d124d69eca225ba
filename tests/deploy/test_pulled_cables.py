"""A fleet survives while its hosts cannot reach each other, in one direction or in both."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cables import apart

pytestmark = pytest.mark.slow

PULLED_S = 3.0
ANSWERED_S = 15.0  # after a cable is plugged in again, every client is answered within this time
GONE_S = 30.0  # keep-alive (15 s), the lease, and one more try


def test_a_pulled_cable_delays_only_its_clients_and_all_are_answered_afterwards(tmp_path: Path) -> None:
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
            # A new conversation needs the directory: it may be refused, or its client may wait no longer.
            assert all(name.startswith("new: ") for name in row["failures"]), row
    assert set(found["decoders"].values()) == {"d0", "d1"}
    assert found["silenced"]["gone_s"] < GONE_S
    before, again = found["silenced"]["conversations"]
    assert before == again > 0  # the host's engine still has their KV
    assert found["silenced"]["used_s"] < ANSWERED_S
    assert (found["left"], found["ended"]) == ([], [])
