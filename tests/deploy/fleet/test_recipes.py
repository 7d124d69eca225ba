"""Every file of recipes/ passes `conserve check` against its model's published config.json.

`published/` has, for each model, the fields of config.json that the checks read, the bytes of the weights,
and the words of the chat template by which parsers are chosen.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.application import app
from deploy.fleet import FleetFileError, FleetSpec, load_fleet
from deploy.fleet.engine_arguments import TierEngines
from deploy.fleet.for_model import GIB, GPU_WORKSPACE
from deploy.fleet.model_architecture import Architecture, architecture_of
from deploy.models.parsers import ModelText, choose
from placement.sizing.accelerators import ACCELERATORS
from tests.support.fleet import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
PUBLISHED = {
    content["id"]: content
    for content in (json.loads(file.read_text()) for file in Path(__file__).parent.glob("published/*.json"))
}


def called(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


@functools.cache
def loaded(file: Path) -> FleetSpec:
    return load_fleet(file)


recipes = pytest.mark.parametrize("file", RECIPES, ids=called)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face cache that contains the published files."""
    home = tmp_path_factory.mktemp("hub")
    for name, content in PUBLISHED.items():
        model = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("1")
        (snapshot / "config.json").write_text(json.dumps(content["config"]))
        (snapshot / "chat_template.jinja").write_text(content["chat_template_marks"])
        index = {"metadata": {"total_size": content["weight_bytes"]}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    return home


@pytest.fixture(autouse=True)
def cached(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(hub))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def architecture(fleet: FleetSpec) -> Architecture:
    published = PUBLISHED[fleet.model.path]
    return architecture_of(published["config"], published["weight_bytes"])


@dataclass(frozen=True)
class Fit:
    """Memory of a recipe's decoder: what its weights and KV take, and how many tokens fit."""

    engines: str
    weights_gib: float  # per GPU
    kv_bytes: int  # per token and GPU
    tokens: int  # tokens of KV that fit in an engine


def fit(fleet: FleetSpec) -> Fit:
    tier, model = fleet.tiers[-1], architecture(fleet)
    engines = TierEngines(fleet, len(fleet.tiers) - 1, tier, model)
    board = ACCELERATORS[tier.hardware.accelerator or ""]
    weights = model.weight_bytes / engines.parallel.gpus
    kv = model.kv_bytes(1, engines.parallel.tensor, engines.kv_width)
    there = board.memory_gib * GIB * float(engines.args["gpu-memory-utilization"])
    counts = " + ".join(str(one.replicas) for one in fleet.tiers)
    named = f"{counts} of {engines.parallel.gpus}"
    return Fit(named, weights / GIB, kv, int((there - GPU_WORKSPACE - weights) / kv))


@recipes
def test_conserve_check_accepts_every_recipe(file: Path) -> None:
    answer = CliRunner().invoke(app, ["check", str(file)])
    assert answer.exception is None, answer.exception
    assert ": valid: fleet " in answer.stdout


@recipes
def test_a_recipe_has_the_parsers_that_serve_would_choose_for_its_model(file: Path) -> None:
    fleet = loaded(file)
    published = PUBLISHED[fleet.model.path]
    chosen = choose(ModelText(published["config"]["model_type"], published["chat_template_marks"]))
    assert {one.option: one.parser for one in chosen if one.parser} == {
        name: value for name, value in fleet.engine.args.items() if name.endswith("-parser")
    }


@recipes
def test_a_recipes_engines_use_all_gpus_of_its_nodes_and_their_ranks_divide_the_model(file: Path) -> None:
    fleet = loaded(file)
    model, hardware = architecture(fleet), fleet.tiers[0].hardware
    engines = [TierEngines(fleet, index, tier, model) for index, tier in enumerate(fleet.tiers)]
    assert len({one.tier.hardware for one in engines}) == 1
    gpus = sum(one.tier.replicas * one.parallel.gpus for one in engines)
    assert gpus == hardware.node_gpus * (hardware.nodes or 1)
    ranks = engines[0].parallel.tensor
    assert model.heads % ranks == 0 and (model.latent_dim or model.kv_heads % ranks == 0)
    assert fit(fleet).tokens >= (fleet.model.max_context or 0)
    config = PUBLISHED[fleet.model.path]["config"]
    if blocks := (config.get("quantization_config") or {}).get("weight_block_size"):  # a rank has whole ones
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        assert width / ranks % blocks[0] == 0


def test_a_recipe_on_gpus_that_are_too_small_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "recipes" / "deepseek-v3" / "8xh200.yaml").read_text()
    smaller = tmp_path / "8xh100.yaml"
    smaller.write_text(text.replace("accelerator: H200", "accelerator: H100"))
    with pytest.raises(FleetFileError, match=r"weights of 641 GiB do not fit 8 x 72 GiB"):
        load_fleet(smaller)


def test_the_table_in_the_recipes_readme_equals_what_is_computed_from_the_recipes() -> None:
    rows = [
        f"| [{file.parent.name}]({called(file)}) | {file.stem} | {fleet.model.max_context:,} | "
        f"{it.engines} | {it.weights_gib:.0f} | {it.kv_bytes / 1024:.4g} | {it.tokens // 1000:,} | no |"
        for file in RECIPES
        for fleet in [loaded(file)]
        for it in [fit(fleet)]
    ]
    written = (ROOT / "recipes" / "README.md").read_text()
    assert re.findall(r"^\| \[.*$", written, re.MULTILINE) == rows, "\n".join(rows)
