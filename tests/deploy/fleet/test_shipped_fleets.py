"""The fleets in configs/ are valid, and name the schema with which editors complete them."""

from pathlib import Path

import pytest

from deploy.fleet import load_fleet
from deploy.generated import SCHEMA_FILE

CONFIGS = sorted(SCHEMA_FILE.parent.glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_every_fleet_in_configs_is_valid(file: Path) -> None:
    fleet = load_fleet(file)
    assert fleet.name == file.stem
    assert f"$schema={SCHEMA_FILE.name}" in file.read_text().splitlines()[0]


def test_the_expected_fleets_are_shipped() -> None:
    assert {"laptop", "a40-paper", "two-nodes"} <= {file.stem for file in CONFIGS}


def test_the_paper_fleet_caps_decoders_at_two_thirds_of_their_power() -> None:
    fleet = load_fleet(SCHEMA_FILE.parent / "a40-paper.yaml")
    assert [(tier.replicas, tier.power_cap_w) for tier in fleet.tiers] == [(1, None), (3, 200)]
