"""`conserve profile` prints what it measured, and measures only under the tier's power cap."""

from pathlib import Path

import pytest

from deploy.cli.commands import profile
from placement.scheduling.latency_model import CONSERVATIVE
from placement.scheduling.prefill_curve import curve_of
from tests.workers.power.machine import PERMISSION, GpuMachine, build
from workers.profiles import Profile, ProfileKey

pytestmark = pytest.mark.slow

KEY = ProfileKey("m", "float32", "cpu", 1, 1, None, "eager", "0.32")
CAPPED = """\
policy: collocated
tiers: [{name: all, role: mixed, power_cap_w: 200}]
"""
MEASURES = """
import asyncio, sys
from pathlib import Path
from deploy.cli.commands.profile import under_cap
from deploy.fleet import parse_fleet
from deploy.fleet.components import EngineName
from deploy.home import FleetHome
from tests.workers.power.machine import GpuMachine

async def main():
    fleet = parse_fleet(sys.argv[1], "fleet.yaml")
    async with under_cap(fleet, EngineName("all-0", fleet.tiers[0]), FleetHome.of(fleet.name)):
        print(GpuMachine(Path(), Path(sys.argv[2]), Path()).limits())

asyncio.run(main())
"""


def test_conserve_profile_prints_the_prefill_time_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "console", profile.Console(width=200))
    profile.show(KEY, Profile(CONSERVATIVE, (), 1e-3, 0.0), 2_048)
    wanted = curve_of(CONSERVATIVE, 2_048)
    assert f"{wanted.a:.3g} + {wanted.b:.3g} n + {wanted.c:.3g} n²" in capsys.readouterr().out


def test_a_tier_is_profiled_under_its_power_cap_and_the_cap_is_undone_afterwards(tmp_path: Path) -> None:
    machine = GpuMachine.of(build(tmp_path / "nvml"), tmp_path)
    done = machine.python(MEASURES, CAPPED, str(machine.state))
    assert done.stdout.strip() == "[200.0, 300.0]", done.stderr
    assert machine.limits() == [300.0, 300.0]


def test_conserve_profile_measures_nothing_if_the_power_cap_cannot_be_set(tmp_path: Path) -> None:
    machine = GpuMachine.of(build(tmp_path / "nvml"), tmp_path)
    machine.write(0, "fails", PERMISSION)
    done = machine.python(MEASURES, CAPPED, str(machine.state))
    assert not done.stdout
    assert "the cap of 200 W could not be set" in done.stderr
