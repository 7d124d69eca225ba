"""vLLM accepts every shipped fleet on GPUs, and each difference from plain vLLM has a reason listed here.
vLLM's own argument parser and configuration run, on a stand-in for a node of H100s (tests/support/h100.py)
and with the config.json of the files' models; nothing is downloaded and no engine starts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from deploy.fleet import FleetSpec, parse_fleet, vllm_options
from deploy.fleet.components import EngineName, engine_spec
from deploy.generated import SCHEMA_FILE
from deploy.home import FleetHome
from deploy.models import smollm2
from tests.deploy.fleet.test_gpu_hour_mistakes import QWEN3_32B
from tests.support.final_config import OPTIONS, Commands, Flat, final_configurations
from workers.keeper.launch import EngineKeys, LaunchSpec, Start, engine_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOME = FleetHome(Path("/state"))
FILES = sorted(SCHEMA_FILE.parent.glob("*.yaml"))
LLAMA_3_1_8B = {
    **QWEN3_32B,  # keeps Qwen's model class, on which no test here depends
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
MODELS = {
    "Qwen/Qwen3-32B": QWEN3_32B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3_1_8B,
    "smollm2": smollm2.CONFIG,
    "small": {**QWEN3_32B, "torch_dtype": "float32"},  # the tests do not depend on its shape
}

FLEET = """\
name: roles
model: {path: Qwen/Qwen3-32B, dtype: bfloat16}
engine: {args: {tensor-parallel-size: 2}}
tiers:
  - {name: prefill, role: prefill}
  - {name: decode, role: decode}
"""
NIXL = FLEET + "transfer: {backend: nixl}\nray: {address: 10.0.0.1:6379}\n"
COSERVING = FLEET + "coserving: {enabled: true}\n"
WITHOUT_SAFEPOINTS = FLEET + "coserving: {enabled: true, safepoints: false}\n"
COLLOCATED = FLEET.replace("name: roles", "name: roles\npolicy: collocated")
V2 = "prefiller with the V2 runner"
ON_V2 = FLEET.replace("role: prefill", 'role: prefill, env: {VLLM_USE_V2_MODEL_RUNNER: "1"}')
ROLES = {
    "prefiller": (FLEET, "prefill"),
    "prefiller with NIXL": (NIXL, "prefill"),
    "decoder": (FLEET, "decode"),
    "decoder with NIXL": (NIXL, "decode"),
    "decoder that co-serves": (COSERVING, "decode"),
    "decoder that co-serves without safepoints": (WITHOUT_SAFEPOINTS, "decode"),
    "collocated": (COLLOCATED, "decode"),
}

EVERYWHERE = {
    "kv_transfer_config": "the connector, which moves and keeps KV",
    "scheduler_config.policy": "offline requests are told from a conversation's turns by their priority",
    "scheduler_config.scheduler_cls": "prompts are cut so that running turns keep their targets",
    "scheduler": "as scheduler_cls; a subclass of vLLM's own that is used there",
    "additional_config": "settings of that scheduler",
    "instance_id": "drawn anew each time",
    "runner": "what is relied on of vLLM is checked in the V1 runner",
}
LEAVES_STEPS = {"parallel_config.worker_cls": "a worker that leaves a step early"}
REASONS: dict[str, dict[str, str]] = {
    "prefiller": EVERYWHERE,
    "prefiller with NIXL": EVERYWHERE,
    "decoder": EVERYWHERE,
    "decoder with NIXL": EVERYWHERE,
    "decoder that co-serves": {**EVERYWHERE, **LEAVES_STEPS},
    "decoder that co-serves without safepoints": {**EVERYWHERE, **LEAVES_STEPS},
    "collocated": EVERYWHERE,
}


def of_tier(text: str, name: str, base: Path) -> LaunchSpec:
    content = yaml.safe_load(text)
    content["model"]["path"] = str(base / content["model"]["path"].replace("/", "--"))
    fleet: FleetSpec = parse_fleet(yaml.safe_dump(content), name)
    tier = next(tier for tier in fleet.tiers if tier.name == name)
    return engine_spec(fleet, EngineName(f"{name}-0", tier), HOME, "10.0.0.2")


def command(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    made = engine_command(spec, Start(1, 8001, 9001), EngineKeys(), {})
    return list(made.argv[3:]), {key: value for key, value in made.env.items() if key.startswith("VLLM_")}


def plain(spec: LaunchSpec) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a user who only names the model and the number of GPUs."""
    sizes = ["--tensor-parallel-size", str(dict(spec.options).get("tensor-parallel-size", 1))]
    return ["--model", spec.model, "--served-model-name", spec.served_name, "--dtype", spec.dtype, *sizes], {}


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Flat]:
    base = tmp_path_factory.mktemp("models")
    for name, content in MODELS.items():
        directory = base / name.replace("/", "--")
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(content))
    commands: Commands = {}
    for role, (text, tier) in ROLES.items():
        spec = of_tier(text, tier, base)
        commands[role], commands["plain"] = command(spec), plain(spec)
    commands[V2] = command(of_tier(ON_V2, "prefill", base))
    for file in FILES:
        for tier in yaml.safe_load(file.read_text())["tiers"]:
            commands[f"{file.stem}: {tier['name']}"] = command(of_tier(file.read_text(), tier["name"], base))
    return final_configurations(commands)


@pytest.mark.parametrize("role", ROLES)
def test_each_difference_from_plain_vllms_configuration_has_a_listed_reason(
    role: str, final: dict[str, Flat]
) -> None:
    ours, theirs = final[role], final["plain"]
    assert "error" not in ours, ours["error"]
    different = {path for path in {*ours, *theirs} if ours.get(path) != theirs.get(path)}
    reasons = REASONS[role]
    without = {
        f"{path}: {theirs.get(path)} -> {ours.get(path)}"
        for path in different
        if not any(path == known or path.startswith(f"{known}.") for known in reasons)
    }
    assert without == set()


@pytest.mark.parametrize("role", ROLES)
def test_engines_of_every_role_schedule_asynchronously(role: str, final: dict[str, Flat]) -> None:
    assert final[role]["scheduler_config.async_scheduling"] == "True"


@pytest.mark.parametrize("role", ROLES)
def test_every_engine_uses_vllms_v1_model_runner(role: str, final: dict[str, Flat]) -> None:
    assert (final[role]["runner"], final["plain"]["runner"]) == ("V1", "V2")


def test_layer_hooks_leave_full_cuda_graphs_on_except_with_vllms_v2_runner(final: dict[str, Flat]) -> None:
    modes = {role: final[role]["compilation_config.cudagraph_mode"] for role in (*ROLES, "plain", V2)}
    assert modes.pop(V2) == "PIECEWISE" and final[V2]["runner"] == "V2"
    assert set(modes.values()) == {"FULL_AND_PIECEWISE"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_vllm_accepts_every_engine_of_a_shipped_file(file: Path, final: dict[str, Flat]) -> None:
    content: Any = yaml.safe_load(file.read_text())
    for tier in content["tiers"]:
        made = final[f"{file.stem}: {tier['name']}"]
        assert "error" not in made, made["error"]
        assert made["model_config.max_model_len"] == str(content["model"]["max_context"])
        size = content["engine"]["args"].get("tensor-parallel-size", 1)
        assert made["parallel_config.tensor_parallel_size"] == str(size)


def test_the_stored_vllm_options_are_those_of_the_installed_release(final: dict[str, Flat]) -> None:
    assert final[OPTIONS]["text"] == vllm_options.FILE.read_text(), (
        "run: python -m tests.support.vllm_options_file"
    )
