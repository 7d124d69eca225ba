"""Mistakes in a fleet file that would waste GPU hours are refused with their line and a correction.

Each case makes one mistake in a valid fleet file; `>` marks the line that the error must name.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.fleet import FleetFileError, load_fleet
from tests.support.fleet import ROOT

QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "vocab_size": 151936,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
}
WEIGHTS = 65_524_246_528  # bytes, as the model's index of weights says

FLEET = """\
name: eight-h100s
model:
  path: MODEL
  dtype: bfloat16
  max_context: 40960
engine:
  args:
    tensor-parallel-size: 2
    gpu-memory-utilization: 0.9
  env: {A_NAME: a}
tiers:
  - name: prefill
    role: prefill
    replicas: 1
    resources: {prefill_tier: 1}
    hardware: {accelerator: H100, nodes: 1}
    args:
      max-num-batched-tokens: 16384
  - name: decode
    role: decode
    replicas: 3
    resources: {decode_tier: 1}
    hardware: {accelerator: H100, nodes: 1}
    power_cap_w: 400
    args:
      max-num-seqs: 256
coserving:
  enabled: true
"""
SEQS, BATCHED, TP = (
    "      max-num-seqs: 256",
    "      max-num-batched-tokens: 16384",
    "    tensor-parallel-size: 2",
)
CAP, ENV = "    power_cap_w: 400", "  env: {A_NAME: a}"
DECODE = "    hardware: {accelerator: H100, nodes: 1}\n    power_cap_w: 400"


def a(line: str) -> str:
    """Return the decoders' options with `line` added and marked with `>`."""
    return f"{SEQS}\n>      {line}"


QWEN3_NEXT = {"layer_types": ["linear_attention", "full_attention"]}

# By mistake: the replaced text, its replacement, the expected error, and further fields of config.json.
CASES: dict[str, tuple[Any, ...]] = {
    "GPUs that are not the ranks": (
        "{decode_tier: 1}",
        "{decode_tier: 1,\n>      GPU: 1}",
        "= 2 ranks and would take 1 GPUs: remove it",
    ),
    "GPUs that stay idle": (
        "{prefill_tier: 1}",
        "{prefill_tier: 1,\n>      GPU: 4}",
        "or set tensor-parallel-size: 4",
    ),
    "a share of a GPU and all of its memory": (
        TP + "\n    gpu-memory-utilization: 0.9",
        ">    gpu-memory-utilization: 0.9",
        "engines that take 0.5 of a GPU share its memory: set gpu-memory-utilization to 0.5 or less",
    ),
    "ranks of prefillers and decoders": (
        SEQS,
        a("tensor-parallel-size: 4"),
        "does not cut heads anew; expected one size, or transfer.backend: n",
    ),
    "staging that a few blocks fill": (
        "coserving:",
        "transfer:\n>  staging_gib: 0.02\ncoserving:",
        "8 blocks or more at a time, of 2 MiB on each of 2 ranks: expected 0.031 or more",
    ),
    "block size across a transfer": (
        SEQS,
        a("block-size: 32"),
        "differ in 'block-size' (not set and 32): set it once, in engine.args",
    ),
    "KV type across a transfer": (
        SEQS,
        a("kv-cache-dtype: fp8"),
        "differ in 'kv-cache-dtype' (not set and fp8): set it once",
    ),
    "weights across a transfer": (SEQS, a("quantization: fp8"), "exchange KV and differ in 'quantization'"),
    "more GPUs than a node has": (TP, ">    tensor-parallel-size: 16", "= 16 GPUs, and a node has 8"),
    "more GPUs than the tier's nodes have": (
        "    replicas: 3",
        ">    replicas: 5",
        "5 engines of 2 GPUs do not fit 1 nodes of 8: at most 4",
    ),
    "more GPUs than a tier can grow to": (
        "    replicas: 3",
        "    replicas: 3\n    autoscale:\n      min: 1\n>      max: 6",
        "6 engines of 2 GPUs",
    ),
    "an accelerator that nobody knows": (
        DECODE,
        ">    hardware: {accelerator: H1OO}",
        "unknown accelerator 'H1OO'; expected one of T4",
    ),
    "a power cap below what the board takes": (
        CAP,
        ">    power_cap_w: 150",
        "a H100 takes limits from 200 to 700 W, not 150",
    ),
    "a power cap above what the board takes": (
        CAP,
        ">    power_cap_w: 1000",
        "a H100 takes limits from 200 to 700 W, not 1000",
    ),
    "an engine over nodes": (SEQS, a("nnodes: 2"), "an engine is on one node, with co-serving and without"),
    "an engine in Ray's hands": (
        SEQS,
        a("distributed-executor-backend: ray"),
        "safepoints and the control socket need its shared memory",
    ),
    "data parallel": (
        SEQS,
        a("data-parallel-size: 2"),
        "hold KV that conversations are not bound to: use replicas: 2",
    ),
    "context parallel": (SEQS, a("decode-context-parallel-size: 2"), "use tensor-parallel-size"),
    "weights that do not fit": (
        TP,
        ">    tensor-parallel-size: 1",
        "weights of 61 GiB do not fit 1 x 40 GiB: set tensor-parallel-size: 2",
    ),
    "a conversation that does not fit": (
        "  max_context: 40960",
        ">  max_context: 400000",
        "takes 49 GiB a GPU, and tier 'prefill' has 41 beside",
        {"max_position_embeddings": 1 << 20},
    ),
    "a conversation longer than the model's": (
        "  max_context: 40960",
        ">  max_context: 40961",
        "the model has positions for 40960 tokens, not for 40961: lower it, or stretch them with hf-",
    ),
    "a conversation longer than YaRN's": (
        "  max_context: 40960",
        ">  max_context: 81920",
        "the model has positions for 40960 tokens",  # already multiplied by the factor
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 20480}},
    ),
    "blocks that hold no whole conversation": (
        SEQS,
        a("num-gpu-blocks-override: 2000"),
        "2000 blocks of 16 tokens hold 32000, and one conversation may",
    ),
    "an option that vLLM does not have": (
        SEQS,
        ">      max-num-seq: 256",
        "vLLM has no option 'max-num-seq'; did you mean 'max-num-seqs'?",
    ),
    "an option with a wrong value": (SEQS, ">      max-num-seqs: many", "expected an integer, not 'many'"),
    "an option of a few values": (SEQS, a("tool-call-parser: qwen"), "expected one of apertus,"),
    "an option that is negated": (
        SEQS,
        a("no-enable-chunked-prefill: true"),
        "written as 'enable-chunked-prefill: false'",
    ),
    "speculative decoding beside co-serving": (
        SEQS,
        a("speculative-config: {method: ngram}"),
        "co-serving does not know the tokens of a draft",
    ),
    "speculative decoding beside the transfer": (
        BATCHED,
        f"{BATCHED}\n>      speculative-config: {{method: ngram}}",
        "the transfer does not know the tok",
    ),
    "adapters": (SEQS, a("enable-lora: true"), "adapters are not served: a fleet has one model"),
    "images beside safepoints": (
        "  enabled: true",
        "  enabled: true\n>  safepoints: true",
        "an aborted step would have to give back encoded",
        {"vision_config": {}},
    ),
    "KV of a type that is not moved": (
        TP,
        f"{TP}\n>    kv-cache-dtype: nvfp4",
        "does not move blocks of 'nvfp4'",
    ),
    "no prefix cache": (
        SEQS,
        a("enable-prefix-caching: false"),
        "finds its KV by the prefix cache",
    ),
    "a pipeline beside the transfer": (
        TP,
        f"{TP}\n>    pipeline-parallel-size: 2",
        "stages of a pipeline do not transfer layers",
    ),
    "full graphs beside safepoints": (
        SEQS,
        a("compilation-config: {cudagraph_mode: FULL}"),
        "without piecewise graphs a step that may be aborted has none",
    ),
    "full graphs, as vLLM's fields": (
        SEQS,
        a("compilation-config.cudagraph_mode: FULL_DECODE_ONLY"),
        "without piecewise graphs a step that may be",
    ),
    "first come, first served beside co-serving": (
        SEQS,
        a("scheduling-policy: fcfs"),
        "offline requests are distinguished from conversations by their priority",
    ),
    "safepoints at no layer": (
        "  enabled: true",
        "  enabled: true\n>  safepoint_layers: 64",
        "the model has 64 layers: no arrival would",
    ),
    "a runner that co-serving does not know": (
        ENV,
        '  env:\n>    VLLM_USE_V2_MODEL_RUNNER: "1"',
        "co-serving needs vLLM's V1 model runner",
    ),
    "GPUs that Ray gives out": (
        ENV,
        '  env:\n>    CUDA_VISIBLE_DEVICES: "0,1"',
        "this would give all of them the same; remove it",
    ),
    "states beside co-serving": (
        "  enabled: true",
        ">  enabled: true",
        "cannot be undone: set coserving.enabled: false",
        QWEN3_NEXT,
    ),
    "states without groups of their own": (
        TP,
        f"{TP}\n>    disable-hybrid-kv-cache-manager: true",
        "blocks of their own: remove it",
        QWEN3_NEXT,
    ),
    "states whose type differs": (
        SEQS,
        a("mamba-ssm-cache-dtype: float32"),
        "exchange KV and differ in 'mamba-ssm-cache-dtype'",
        QWEN3_NEXT,
    ),
    "states only": (
        "  path: MODEL",
        ">  path: MODEL",
        "no layer of this model has attention",
        {"model_type": "mamba2", "layer_types": ["mamba2"], "num_attention_heads": None},
    ),
    "layers without hooks": (
        "  path: MODEL",
        ">  path: MODEL",
        "set coserving.safepoints: false",
        {"model_type": "deepseek_v32", "index_topk": 2048},
    ),
    "NIXL that is not installed": (
        "coserving:",
        "transfer:\n>  backend: nixl\ncoserving:",
        "'nixl' is not installed: pip install",
    ),
}


@pytest.fixture(autouse=True)
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.fleet.checks.find_spec", lambda name: None)


def write(base: Path, text: str, more: dict[str, Any]) -> Path:
    model = base / "Qwen3-32B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**QWEN3_32B, **more}))
    index = {"metadata": {"total_size": WEIGHTS}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    file = base / "fleet.yaml"
    file.write_text(text.replace("path: MODEL", f"path: {model}"))
    return file


def special(name: str, text: str) -> str:
    if name == "a share of a GPU and all of its memory":
        return text.replace("{decode_tier: 1}", "{decode_tier: 1, GPU: 0.5}").replace(
            "replicas: 3", "replicas: 8"
        )
    if name == "weights that do not fit":
        return text.replace("utilization: 0.9", "utilization: 0.5")
    return text


def test_the_fleet_file_without_a_mistake_is_valid(tmp_path: Path) -> None:
    load_fleet(write(tmp_path, FLEET, {}))


@pytest.mark.parametrize("name", CASES)
def test_a_costly_mistake_is_refused_with_its_line_and_the_correction(name: str, tmp_path: Path) -> None:
    old, new, said, *more = CASES[name]
    assert FLEET.count(old) >= 1
    marked = special(name, old.join(FLEET.rsplit(old, 1)[:1]) + new + FLEET.rsplit(old, 1)[1])
    lines = marked.splitlines()
    named = [number for number, line in enumerate(lines, 1) if line.startswith(">")]
    text = "\n".join(line.removeprefix(">") for line in lines) + "\n"
    with pytest.raises(FleetFileError) as caught:
        load_fleet(write(tmp_path, text, more[0] if more else {}))
    found = [problem for problem in caught.value.problems if said in problem]
    assert found, str(caught.value)
    if named:
        assert [int(problem.split(":")[1]) for problem in found] == named


@pytest.mark.parametrize(
    ("stretch", "config"),
    [
        (f"{TP}\n    hf-overrides: {{max_position_embeddings: 81920}}", {}),
        (f"{TP}\n    hf-overrides.max_position_embeddings: 81920", {}),
        (TP, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (TP, {"model_max_length": 81920}),
        (TP, {"max_position_embeddings": 81920, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ],
    ids=["overrides", "an override", "linear", "Command R", "YaRN"],
)
def test_a_context_that_rope_scaling_stretches_is_accepted(
    stretch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    text = FLEET.replace("max_context: 40960", "max_context: 81920").replace(TP, stretch)
    load_fleet(write(tmp_path, text, config))


@pytest.mark.parametrize("kinds", [["sliding_attention", "full_attention"], ["sliding_attention"]], ids=str)
def test_models_with_sliding_windows_may_co_serve(kinds: list[str], tmp_path: Path) -> None:
    load_fleet(write(tmp_path, FLEET, {"layer_types": kinds, "sliding_window": 1024}))


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_co_serving_accepts_graph_modes_that_have_piecewise_graphs(mode: str, tmp_path: Path) -> None:
    said = a(f"compilation-config.cudagraph_mode: {mode}").replace(">", "")
    load_fleet(write(tmp_path, said.join(FLEET.rsplit(SEQS, 1)), {}))


def test_layers_with_a_state_are_served_and_not_counted_as_kv(tmp_path: Path) -> None:
    """The context is so long that the KV of a conversation would not fit if all layers had KV."""
    alone = FLEET.replace("  enabled: true", "  enabled: false").replace("40960", "1000000")
    long = {"max_position_embeddings": 1_000_000}
    (tmp_path / "dense").mkdir()
    with pytest.raises(FleetFileError, match="KV of a conversation"):
        load_fleet(write(tmp_path / "dense", alone, long))
    for name, some in (
        (
            "listed",
            {
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
                * 16
            },
        ),
        ("by interval", {"linear_num_key_heads": 16, "full_attention_interval": 4}),
    ):
        (tmp_path / name).mkdir()
        load_fleet(write(tmp_path / name, alone, {**long, **some}))


def test_models_with_recurrent_states_are_refused_with_nixl_and_with_lmcache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.fleet.checks.find_spec", lambda name: True)
    wrong = ("transfer: {backend: nixl}", "not by NIXL"), ("kv: {kv_tiers: [lmcache]}", "stored in LMCache")
    for number, (line, said) in enumerate(wrong):
        (tmp_path / str(number)).mkdir()
        text = FLEET.replace("  enabled: true", "  enabled: false") + line + "\n"
        with pytest.raises(FleetFileError, match=said):
            load_fleet(write(tmp_path / str(number), text, QWEN3_NEXT))


def test_latent_attention_is_refused_on_cpus_only(tmp_path: Path) -> None:
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    on_a_cpu = """\
name: laptop
policy: collocated
model: {path: MODEL, dtype: float32, max_context: 4096}
engine: {device: cpu}
tiers:
  - {name: decode, role: decode, replicas: 1, resources: {decode_tier: 1}}
"""
    said = []
    for name, text in (("cpu", on_a_cpu), ("gpu", FLEET)):
        (tmp_path / name).mkdir()
        try:
            load_fleet(write(tmp_path / name, text, latent))
            said.append("")
        except FleetFileError as refused:
            said.append(str(refused))
    assert "vLLM's CPU build computes no prompt of this model (latent attention)" in said[0]
    assert "latent attention" not in said[1]


def test_checking_a_fleet_file_imports_no_large_library() -> None:
    """`conserve check` has to end within two seconds, and importing vLLM alone takes longer."""
    heavy = "{'vllm', 'torch', 'transformers', 'ray'}"
    code = f"import sys, deploy.fleet.checks; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
