"""`conserve up` without --detach waits as long as its own run of the fleet lasts."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.cli.commands import up
from deploy.home import FleetHome, RunRecord

OURS = RunRecord(pid=41, started=1.0, ray_address="127.0.0.1:1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetHome:
    monkeypatch.setattr(up, "LOOK_EVERY_S", 0.01)
    home = FleetHome(tmp_path)
    home.write_run(OURS)
    return home


def ends_after(change: Callable[[], object], home: FleetHome) -> bool:
    waiting = threading.Thread(target=up.wait_for_its_end, args=(home,), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    change()
    waiting.join(0.5)
    return not waiting.is_alive()


def test_it_ends_when_the_fleet_is_brought_down(home: FleetHome) -> None:
    assert ends_after(home.run_file.unlink, home)


def test_it_ends_when_another_run_has_taken_its_place(home: FleetHome) -> None:
    assert ends_after(lambda: home.write_run(replace(OURS, pid=42, started=2.0)), home)


def test_an_upgrade_is_no_end(home: FleetHome) -> None:
    assert not ends_after(lambda: home.write_run(replace(OURS, endpoint="http://127.0.0.1:8001")), home)
