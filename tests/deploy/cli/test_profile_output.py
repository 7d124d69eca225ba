"""What `conserve profile` says can be copied into the fleet file."""

import re

import pytest

from deploy.cli.commands import profile
from deploy.fleet import parse_fleet
from placement.fleet.prefillers import curve_of
from placement.iteration.latency import CONSERVATIVE
from workers.profiles import Profile, ProfileKey


def test_the_prefill_curve_it_prints_is_taken_by_a_fleet_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "console", profile.Console(width=200))
    profile.show(ProfileKey("m", "cpu", "0.32"), Profile(CONSERVATIVE, (), 1e-3, 0.0), 2_048)
    line = re.search(r"prefill_curve: \{.*\}", capsys.readouterr().out)
    assert line is not None
    fleet = parse_fleet(
        f"policy: collocated\ntiers: [{{name: p, role: mixed, replicas: 1, {line.group()}}}]\n", "f.yaml"
    )
    taken = fleet.tiers[0].prefill_curve
    wanted = curve_of(CONSERVATIVE, 2_048)
    assert taken is not None
    assert (taken.a, taken.b, taken.c) == pytest.approx((wanted.a, wanted.b, wanted.c), rel=0.01)
