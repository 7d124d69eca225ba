"""A fleet does not use a Ray cluster without token authentication."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.fleet import ROOT
from tests.support.nodes import Nodes

pytestmark = pytest.mark.slow

# Ray reads its environment when it is imported: a process of its own.
DRIVER = """
import os, sys
from deploy.errors import LifecycleError
from deploy.fleet import parse_fleet
from deploy.home import FleetHome, RunRecord
from deploy.ray.cluster import connect, refuse_open_cluster
text = "tiers: [{name: prefill, role: prefill}, {name: decode, role: decode}]\\nray: {address: '%s'}"
fleet = parse_fleet(text % sys.argv[1], "f")
try:
    refuse_open_cluster(connect(fleet, FleetHome.of("x"), RunRecord(0, 0.0, sys.argv[1])))
    print("TAKEN")
except LifecycleError as refused:
    print("REFUSED", refused)
"""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.close()


def driver(nodes: Nodes, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, nodes.address],
        env={**env, **environment, "HOME": str(nodes.directory)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_a_cluster_that_requires_its_token_accepts_a_driver_that_has_it(nodes: Nodes) -> None:
    nodes.start_head({"control_node": 1})
    assert "TAKEN" in driver(nodes, **nodes.environment)
    assert "REFUSED no token of a Ray cluster" in driver(nodes)


def test_a_cluster_without_authentication_is_refused(nodes: Nodes) -> None:
    token = nodes.environment["RAY_AUTH_TOKEN_PATH"]
    nodes.environment = {"RAY_AUTH_MODE": "disabled"}
    nodes.start_head({"control_node": 1})
    for mode in ("token", "disabled"):
        said = driver(nodes, RAY_AUTH_TOKEN_PATH=token, RAY_AUTH_MODE=mode)
        assert "REFUSED Ray at" in said and "asks for no token" in said
