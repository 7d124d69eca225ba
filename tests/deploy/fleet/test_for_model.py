"""`conserve serve` makes a valid fleet for a model, as large as the machine allows."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from deploy.errors import DeployError
from deploy.fleet import FleetSpec, parse_fleet
from deploy.fleet.components import placer_settings
from deploy.fleet.for_model import GIB, Machine, Wishes, fleet_for
from deploy.fleet.model_architecture import Architecture, architecture_of
from deploy.models import smollm2

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
SMALL = architecture_of(smollm2.CONFIG, smollm2.WEIGHT_BYTES)
MIDDLE = architecture_of(QWEN3_8B, 16 * GIB)
LARGE = architecture_of({**QWEN3_8B, "num_attention_heads": 64, "num_hidden_layers": 80}, 140 * GIB)
PIPELINE = {"pipeline-parallel-size": 2}
LAPTOP = Machine(cores=4, memory=15 * GIB)


def h100s(count: int) -> Machine:
    return Machine(64, 500 * GIB, (80 * GIB,) * count, "H100")


def fleet(model: Architecture, machine: Machine, **wishes: Any) -> FleetSpec:
    content = fleet_for(Wishes("org/Some-Model.v2", **wishes), model, machine)
    return parse_fleet(yaml.safe_dump(content), "made")


def tiers(made: FleetSpec) -> list[tuple[str, int]]:
    return [(tier.name, tier.replicas) for tier in made.tiers]


def test_serve_on_one_gpu_makes_one_co_serving_engine() -> None:
    made = fleet(MIDDLE, h100s(1))
    assert made.name == "some-model-v2"
    assert (made.policy, tiers(made), made.coserving.enabled) == ("collocated", [("decode", 1)], True)
    assert made.model.max_context == 40960


def test_serve_splits_several_gpus_into_prefillers_and_decoders() -> None:
    made = fleet(MIDDLE, h100s(8), power_cap_w=400)
    (prefill, prefillers), (decode, decoders) = tiers(made)
    assert (prefill, decode, prefillers + decoders) == ("prefill", "decode", 8) and decoders > prefillers
    assert [tier.power_cap_w for tier in made.tiers] == [None, 400]


@pytest.mark.parametrize(
    ("machine", "asked", "made"),
    [
        (h100s(8), {"decode": 3}, (5, 3)),
        (h100s(8), {"decode": 8}, (0, 8)),
        (h100s(8), {"prefill": 3}, (3, 5)),
        (h100s(8), {"prefill": 0}, (0, 8)),
        (h100s(1), {"decode": 1}, (0, 1)),
        (h100s(8), {"prefill": 1, "decode": 2}, (1, 2)),
        (h100s(8), {"decode": 2, "options": PIPELINE, "coserving": False}, (0, 2)),  # which transfers no KV
        (LAPTOP, {"decode": 1}, (2, 1)),
        (LAPTOP, {"decode": 2}, (1, 2)),
        (LAPTOP, {"prefill": 1}, (1, 2)),
        (LAPTOP, {"prefill": 0}, (0, 3)),
        (replace(LAPTOP, memory=7 * GIB), {"prefill": 0}, (0, 1)),
        (replace(LAPTOP, memory=7 * GIB), {"decode": 1}, (0, 1)),
    ],
)
def test_serve_given_the_number_of_one_role_gives_the_other_role_the_remaining_engines(
    machine: Machine, asked: dict[str, Any], made: tuple[int, int]
) -> None:
    if not machine.gpu_memory:
        asked = {"dtype": "float32", "max_context": 8192, **asked}
    counts = dict(tiers(fleet(MIDDLE if machine.gpu_memory else SMALL, machine, **asked)))
    assert (counts.get("prefill", 0), counts["decode"]) == made


def test_an_engine_of_a_large_model_takes_several_gpus() -> None:
    made = fleet(LARGE, h100s(8))
    assert made.engine.args["tensor-parallel-size"] == 4
    assert sum(replicas for _, replicas in tiers(made)) == 2


def test_serve_limits_the_context_to_what_the_memory_holds() -> None:
    made = fleet(MIDDLE, Machine(8, 60 * GIB, (24 * GIB,), "L4"))
    assert 2048 <= (made.model.max_context or 0) < 40960


def test_serve_without_gpus_makes_a_small_fleet_that_fits_a_laptop() -> None:
    made = fleet(SMALL, LAPTOP, dtype="float32", max_context=8192)
    assert (made.engine.device, tiers(made)) == ("cpu", [("prefill", 1), ("decode", 2)])
    kv = made.engine.args["num-gpu-blocks-override"] * SMALL.kv_bytes(32, 1, 4)
    assert 3 * (SMALL.weight_bytes + kv) < 8 * GIB


def test_serve_on_cpus_plans_memory_for_the_requested_context() -> None:
    made = fleet(SMALL, LAPTOP, dtype="float32", max_context=32_768)
    assert made.model.max_context == 32_768 and tiers(made) == [("prefill", 1), ("decode", 2)]
    kv_tokens = 32 * (made.engine.args["num-gpu-blocks-override"] - 1)  # one block is vLLM's own
    settings = placer_settings(made)
    assert settings.fill * kv_tokens >= 32_768 + settings.headroom_tokens
    fewer = fleet(SMALL, replace(LAPTOP, memory=10 * GIB), dtype="float32", max_context=32_768)
    assert fewer.model.max_context == 32_768 and tiers(fewer) == [("decode", 1)]


def test_serve_with_pipeline_parallelism_makes_collocated_engines() -> None:
    made = fleet(
        LARGE, h100s(8), options={"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, coserving=False
    )
    assert (made.policy, tiers(made)) == ("collocated", [("decode", 2)])
    assert made.model.max_context == 40960


@pytest.mark.parametrize(
    ("asked", "machine", "enabled"),
    [(None, h100s(1), True), (False, h100s(1), False), (None, h100s(2), False), (True, h100s(2), True)],
)
def test_serve_co_serves_as_the_option_says_and_by_default_only_on_collocated_engines(
    asked: bool | None, machine: Machine, enabled: bool
) -> None:
    assert fleet(MIDDLE, machine, coserving=asked).coserving.enabled is enabled


@pytest.mark.parametrize(
    ("model", "machine", "wishes", "said"),
    [
        (LARGE, h100s(1), {}, "weights of 140 GiB do not fit 1 x 72 GiB"),
        (
            MIDDLE,
            LAPTOP,
            {},
            "16.0 GiB of weights, and with 1 engine and 15.0 GiB of free memory there is no room",
        ),
        (
            MIDDLE,
            h100s(2),
            {"prefill": 1, "decode": 2},
            "3 engines with 1 GPU each do not fit this machine's 2 GPUs: at most 2 engines;",
        ),
        (
            MIDDLE,
            h100s(1),
            {"max_context": 900_000},
            "^conversations of 900000 tokens do not fit: .* room for .*: lower --max-model-len, ",
        ),
        (MIDDLE, h100s(2), {"prefill": 2}, "3 engines with 1 GPU each do not fit this machine's 2 GPUs"),
        (MIDDLE, h100s(2), {"options": {"tensor-parallel-size": 4}}, "an engine with 4 GPUs does not fit"),
        (
            MIDDLE,
            h100s(2),
            {"options": {"pipeline-parallel-size": 0}},
            "--pipeline-parallel-size: expected 1",
        ),
        (MIDDLE, replace(h100s(1), takes_caps=False), {"power_cap_w": 300}, "--power-cap: the driver of"),
    ],
)
def test_serve_says_why_a_model_does_not_fit_the_machine(
    model: Architecture, machine: Machine, wishes: dict[str, Any], said: str
) -> None:
    with pytest.raises(DeployError, match=said):
        fleet(model, machine, **wishes)
