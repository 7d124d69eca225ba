"""The fleets in configs/ are valid, and name the schema with which editors complete them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.application import app
from deploy.fleet import load_fleet
from deploy.fleet.components import placer_settings
from deploy.generated import SCHEMA_FILE

CONFIGS = sorted(SCHEMA_FILE.parent.glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_every_fleet_in_configs_is_valid(file: Path) -> None:
    fleet = load_fleet(file)
    assert fleet.name == file.stem
    assert f"$schema={SCHEMA_FILE.name}" in file.read_text().splitlines()[0]


def test_the_laptop_paper_and_two_node_fleets_are_in_configs() -> None:
    assert {"laptop", "a40-paper", "two-nodes"} <= {file.stem for file in CONFIGS}


def test_the_paper_fleet_caps_decoders_at_two_thirds_of_their_power() -> None:
    fleet = load_fleet(SCHEMA_FILE.parent / "a40-paper.yaml")
    assert [(tier.replicas, tier.power_cap_w) for tier in fleet.tiers] == [(1, None), (3, 200)]


@pytest.mark.parametrize(("blocks", "longest"), [(1024, 28_467), (1173, 32_758), (1174, None)])
def test_conserve_check_says_which_prompts_are_too_long_for_a_laptops_decoder(
    tmp_path: Path, blocks: int, longest: int | None
) -> None:
    text = (SCHEMA_FILE.parent / "laptop.yaml").read_text()
    file = tmp_path / "laptop.yaml"
    file.write_text(text.replace("max_context: 8192", "max_context: 32768").replace(": 768", f": {blocks}"))
    fleet = load_fleet(file)
    settings = placer_settings(fleet)
    fits = int(settings.fill * blocks * int(fleet.engine.args["block-size"])) - settings.headroom_tokens
    assert fits == longest or (longest is None and fits >= 32_768)
    said = CliRunner().invoke(app, ["check", str(file)]).stdout
    note = f"tier 'decode': a prompt of more than {longest} tokens is refused with 400: "
    assert (note in said and "For 32768 set num-gpu-blocks-override: 1174," in said) == (longest is not None)
    assert "tier 'prefill':" not in said  # it holds no conversations
