"""`conserve up` soon says in a sentence that a start is impossible, and leaves nothing behind."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import router.gateway.config
from deploy.errors import ActorLost, LifecycleError
from deploy.fleet import parse_fleet
from deploy.home import FleetHome, RunRecord
from deploy.lifecycle.down import marked
from deploy.lifecycle.up import ended_elsewhere, refuse_what_does_not_fit
from router.directory.journal import Journal, Row
from router.gateway.config import GatewayConfig, ServedModel
from tests.support.fleet import ROOT, conserve
from workers.processes import free_port

pytestmark = pytest.mark.slow

Edit = Callable[[dict[str, Any]], object]


def random(edit: Edit) -> str:
    content = yaml.safe_load((ROOT / "configs" / "random.yaml").read_text())
    content["gateway"]["port"] = free_port("127.0.0.1")
    edit(content)
    return yaml.safe_dump(content)


@pytest.fixture
def base() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="conserve-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def refused(base: Path, edit: Edit) -> str:
    file = base / "fleet.yaml"
    file.write_text(random(edit))
    answer = conserve(base, "up", str(file), "--detach")
    assert answer.returncode == 1, answer.stdout
    assert "Traceback" not in answer.stderr
    assert not marked(FleetHome.of("random", str(base)))
    return answer.stderr.strip()


def test_conserve_up_reports_a_missing_model(base: Path) -> None:
    said = refused(base, lambda content: content["model"].update(path="/no/such/model"))
    assert said.startswith("conserve: model.path: there is no model in /no/such/model; it must be ")


def test_conserve_up_reports_a_taken_port(base: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(base, lambda content: content["gateway"].update(port=port))
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "choose another port (--port" in said


def test_conserve_up_reports_a_damaged_journal(base: Path) -> None:
    home = FleetHome.of("random", str(base))
    Journal.create(home.journal, [Row(f"c:{number}", "whole", b"{}") for number in range(2000)])
    data = bytearray(home.journal.read_bytes())
    data[len(data) // 2] ^= 8
    home.journal.write_bytes(data)
    said = refused(base, lambda content: None)
    assert f"{home.journal} is damaged" in said
    assert f"`conserve journal repair {home.journal}` says what is left" in said


FEW = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000)); "
SAYS = (
    "gateway.limits.connections is 8192, for which a gateway opens up to 16640 files, and here it may open "
    "1000 (ulimit -Hn): allow more, or set it to 372 at most"
)


def test_conserve_up_reports_too_low_a_limit_of_open_files(base: Path) -> None:
    """`conserve up` reports the limit of its own machine, and a gateway that of the machine where it runs."""
    fleet = base / "fleet.yaml"
    fleet.write_text(random(lambda content: None))
    config = GatewayConfig("127.0.0.1:9", (ServedModel("small"),), port=0)
    (base / "gateway.json").write_bytes(router.gateway.config.dump(config))
    for code in (
        f"from deploy.cli import main; sys.argv = ['conserve', 'up', {str(fleet)!r}, '--detach']; main()",
        f"from router.gateway.main import main; sys.exit(main(['--config', {str(base / 'gateway.json')!r}]))",
    ):
        environment = {**os.environ, "CONSERVE_HOME": str(base)}
        command = [sys.executable, "-c", FEW + code]
        answer = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert SAYS in answer.stderr, answer.stderr
        assert answer.returncode in (1, 2)
        assert "Traceback" not in answer.stderr


@pytest.mark.slow
def test_conserve_up_that_finds_no_ray_cluster_says_so_and_leaves_nothing_up(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token" * 8)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    said = refused(base, lambda content: content.update(ray={"address": address}))
    assert f"no Ray cluster answers at {address}" in said
    assert "start Ray there first" in said
    assert "nothing was up" in conserve(base, "down", "random").stdout


@pytest.mark.parametrize(
    ("resources", "there", "fits"),
    [
        ({"GPU": 1}, {"GPU": 2.0}, True),
        ({"GPU": 1}, {"GPU": 1.0}, False),
        ({"GPU": 1}, {}, False),
        ({"decode_tier": 1}, {"decode_tier": 10_000.0}, True),
    ],
)
def test_conserve_up_refuses_tiers_that_need_more_than_the_machine_has(
    resources: dict[str, float], there: Any, fits: bool
) -> None:
    fleet = parse_fleet(random(lambda content: content["tiers"][1].update(resources=resources)), "f")
    there = {"prefill_tier": 1.0, **there}
    if fits:
        refuse_what_does_not_fit(fleet, there)
        return
    with pytest.raises(LifecycleError, match="2 x decode take 2 GPU, and this machine has"):
        refuse_what_does_not_fit(fleet, there)


def test_a_start_that_another_command_ended_is_distinguished_from_a_failed_start(base: Path) -> None:
    home = FleetHome.of("random", str(base))
    home.create()
    ours = RunRecord(os.getpid(), psutil.Process().create_time(), "127.0.0.1:1")
    home.write_run(ours)
    lost = ActorLost("the keeper of decode-0 failed")
    assert not ended_elsewhere(home, lost)
    home.write_run(replace(ours, ending=True))
    assert ended_elsewhere(home, lost)
    assert ended_elsewhere(home, LifecycleError("engine decode-0 cannot start"))
    assert not ended_elsewhere(home, KeyboardInterrupt())
    home.write_run(replace(ours, started=1.0))  # the supervisor is gone
    assert ended_elsewhere(home, lost)
    assert not ended_elsewhere(home, LifecycleError("Ray did not start"))
