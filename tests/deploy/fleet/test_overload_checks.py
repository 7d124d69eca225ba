"""Fleet files with `overload.policy: drop` are refused, with the reason, where dropping cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.fleet import FleetFileError, parse_fleet
from deploy.fleet.components import connector, engine_spec, engines
from deploy.home import FleetHome
from placement.engines import Role
from workers.engine.coserving.config import PROMPT_SCHEDULER, SCHEDULER_CLASS, WORKER_CLASS
from workers.engine.overload.config import OVERLOAD_PLUGIN
from workers.keeper.launch import Device

DROPS = """\
name: test
engine: {device: cpu, args: {enforce-eager: true}}
transfer: {backend: tcp}
coserving: {enabled: false}
tiers:
  - {name: prefill, role: prefill}
  - {name: decode, role: decode, replicas: 2}
overload: {policy: drop}
"""


def every_mistake(text: str) -> list[str]:
    try:
        parse_fleet(text, "fleet.yaml")
    except FleetFileError as error:
        return list(error.problems)
    return []


def test_a_fleet_file_that_allows_dropping_is_valid() -> None:
    assert parse_fleet(DROPS, "fleet.yaml").overload.policy == "drop"
    assert parse_fleet(DROPS.replace("backend: tcp", "encrypt: true"), "fleet.yaml").transfer.encrypt


@pytest.mark.parametrize("device", [Device.CPU, Device.CUDA])
@pytest.mark.parametrize("coserves", [False, True])
def test_co_serving_engines_may_drop_parameters(device: Device, coserves: bool, tmp_path: Path) -> None:
    text = DROPS.replace("enabled: false", f"enabled: {str(coserves).lower()}")
    fleet = parse_fleet(text.replace("device: cpu", f"device: {device}"), "fleet.yaml")
    decoder = next(one for one in engines(fleet) if one.tier.role is Role.DECODE)
    spec = engine_spec(fleet, decoder, FleetHome(tmp_path), "127.0.0.1")
    assert spec.connector is not None and OVERLOAD_PLUGIN in spec.connector.plugins
    assert spec.worker_class == WORKER_CLASS
    assert spec.scheduler_class == (SCHEDULER_CLASS if coserves else PROMPT_SCHEDULER)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("enforce-eager: true", "max-num-seqs: 8", "set enforce-eager: true"),
        ("enforce-eager: true", "enforce-eager: true, tensor-parallel-size: 2", "its engines have 2 ranks"),
        ("enforce-eager: true", "enforce-eager: true, quantization: awq", "may pack weights"),
        ("enforce-eager: true", "enforce-eager: true, enable-lora: true", "and LoRA have parameters"),
        ("replicas: 2", "replicas: 1", "no tier has two"),
        ("backend: tcp", "backend: nixl", "set transfer.backend: tcp"),
    ],
)
def test_a_setting_that_prevents_dropping_is_reported_with_the_reason(
    right: str, wrong: str, said: str
) -> None:
    assert right in DROPS
    text = DROPS.replace(right, wrong)
    found = [one for one in every_mistake(text) if said in one]
    assert found and all("fleet.yaml:8: overload.policy: 'drop' does not work here: " in one for one in found)
    assert not any("overload" in one for one in every_mistake(text.replace("drop", "park")))


ON_GPUS = DROPS.replace("device: cpu, args: {enforce-eager: true}", "device: cuda, args: {ARGS}")


@pytest.mark.parametrize(
    ("args", "works"),
    [
        ("enforce-eager: true", True),
        ("compilation-config: {cudagraph_mode: PIECEWISE}", True),
        ("compilation-config.cudagraph_mode: NONE", True),
        ("compilation-config.cudagraph_mode: FULL_AND_PIECEWISE", False),
        ("compilation-config: {cudagraph_mode: FULL_DECODE_ONLY}", False),
        ("max-num-seqs: 8", False),  # vLLM's default has full graphs
    ],
)
def test_full_cuda_graphs_prevent_dropping(args: str, works: bool) -> None:
    found = every_mistake(ON_GPUS.replace("ARGS", args))
    assert works == (not found)
    assert all("set compilation-config.cudagraph_mode: PIECEWISE" in one for one in found)


def test_dropping_on_vllms_v2_model_runner_is_refused() -> None:
    other = "device: cpu, env: {VLLM_USE_V2_MODEL_RUNNER: '1'}"
    (found,) = every_mistake(DROPS.replace("device: cpu", other))
    assert "dropping needs vLLM's V1 model runner" in found and found.startswith("fleet.yaml:2: engine.env.")
    assert not every_mistake(DROPS.replace("device: cpu", other).replace("drop", "park"))


@pytest.mark.parametrize("harvests", [True, False])
def test_a_prefiller_on_the_v2_runner_is_refused_only_if_it_co_serves(harvests: bool) -> None:
    prefiller = 'role: prefill, env: {VLLM_USE_V2_MODEL_RUNNER: "1"}'
    found = every_mistake(
        "engine: {device: cpu}\ncoserving: {enabled: true}\n"
        f"batch: {{harvest_prefill: {str(harvests).lower()}}}\n"
        f"tiers: [{{name: first, {prefiller}}}, {{name: decode, role: decode}}]\n"
    )
    assert [("co-serving needs vLLM's V1 model runner" in one) for one in found] == [True] * harvests


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
STATES = {"layer_types": ["linear_attention", "full_attention"]}
REFUSED: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": WINDOWS,
    "Gemma3ForConditionalGeneration": {"text_config": WINDOWS},
    "GptOssForCausalLM": WINDOWS,
    "Qwen3NextForCausalLM": STATES,
    "Qwen3MoeForCausalLM": {},
    "MistralForCausalLM": {},
}


def of_model(folder: Path, architecture: str, **said: Any) -> str:
    folder.mkdir(exist_ok=True)
    content = {"architectures": [architecture], "num_hidden_layers": 2, "num_attention_heads": 4, **said}
    (folder / "config.json").write_text(json.dumps(content))
    return DROPS.replace("name: test\n", f"name: test\nmodel: {{path: {folder}}}\n")


@pytest.mark.parametrize("architecture", REFUSED)
def test_dropping_is_refused_for_models_whose_engines_would_not_start(
    architecture: str, tmp_path: Path
) -> None:
    text = of_model(tmp_path, architecture, **REFUSED[architecture])
    (found,) = every_mistake(text)
    assert found.startswith("fleet.yaml:9: overload.policy: 'drop' does not work here: ")
    assert architecture in found and found.endswith("set overload.policy: park")
    assert not every_mistake(text.replace("drop", "park"))


def test_dropping_is_refused_for_models_with_several_kinds_of_layers(tmp_path: Path) -> None:
    assert not every_mistake(of_model(tmp_path, "Qwen3ForCausalLM", layer_types=["full_attention"] * 2))
    (found,) = every_mistake(of_model(tmp_path, "LlamaForCausalLM", **WINDOWS))
    assert "layers have windows or states" in found and found.endswith("set overload.policy: park")


@pytest.mark.parametrize(
    ("policy", "host_kv_gib", "idle_kv_evictable"),
    [("off", 0.0, False), ("preempt", 0.0, True), ("park", 4.0, False), ("drop", 4.0, False)],
)
def test_each_overload_policy_decides_on_host_memory_and_eviction_of_idle_kv(
    policy: str, host_kv_gib: float, idle_kv_evictable: bool
) -> None:
    fleet = parse_fleet(DROPS.replace("policy: drop", f"policy: {policy}"), "fleet.yaml")
    told = connector(fleet, Role.DECODE)
    assert (told.host_kv_gib, told.idle_kv_evictable) == (host_kv_gib, idle_kv_evictable)


@pytest.mark.parametrize("policy", ["off", "preempt"])
@pytest.mark.parametrize(
    ("block", "key"),
    [
        ("kv: {host_kv_gib: 2}", "kv.host_kv_gib"),
        ("kv: {kv_tiers: [host]}", "kv.kv_tiers"),
        ("conversation: {park_after: 5s}", "conversation.park_after"),
    ],
)
def test_keys_of_parking_are_refused_with_a_policy_that_parks_nothing(
    policy: str, block: str, key: str
) -> None:
    text = DROPS.replace("policy: drop", f"policy: {policy}") + block + "\n"
    said = f"fleet.yaml:9: {key}: nothing is parked with overload.policy '{policy}': take this out"
    assert [one for one in every_mistake(text) if one.startswith(said)]
    assert not every_mistake(text.replace(policy, "park"))
