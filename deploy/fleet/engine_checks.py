"""Checks for engines that would fail after minutes of loading, or would serve wrongly.

Each check is a function of the engines of one tier, or of two tiers that exchange KV. It covers what vLLM
notices late, and what our connector and the roll-back cannot do. What vLLM refuses early is left to vLLM.
"""

from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Any

from deploy.errors import KeyPath, Problem
from deploy.fleet import vllm_options
from deploy.fleet.engine_arguments import TierEngines
from deploy.fleet.model_architecture import Architecture, find_architecture
from deploy.fleet.schema import FleetSpec, default
from placement.routing.placer_settings import PlacerSettings
from placement.sizing.accelerators import ACCELERATORS

GIB = 1 << 30
FILL = default(PlacerSettings, "fill")  # share of an engine's KV that conversations get
KV_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
NODES = ("nnodes", "node-rank", "master-addr", "master-port")
OUR_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "Ray gives each engine its GPUs; this would give all of them the same",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "each engine is given a port of its own",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "each engine is given the address that others reach it by",
    "VLLM_KV_CACHE_LAYOUT": "the connector asks for the layout in which blocks can be moved",
}
WHOLE_WINDOWS = "disable-hybrid-kv-cache-manager"  # keeps all KV of layers that attend to a window
# Options that decide how KV is laid out: engines that differ in one misread each other's KV.
SAME_KV = (
    WHOLE_WINDOWS,
    "block-size",
    "kv-cache-dtype",
    "quantization",
    "revision",
    "hf-overrides",
    "load-format",
    *("mamba-cache-dtype", "mamba-ssm-cache-dtype"),
)


def check_engines(fleet: FleetSpec) -> Iterator[Problem]:
    model = find_architecture(fleet.model.path)
    tiers = [TierEngines(fleet, index, tier, model) for index, tier in enumerate(fleet.tiers)]
    found = [problem for one in tiers for check in CHECKS for problem in check(one)]
    if fleet.policy != "collocated":
        found += [problem for one in tiers[1:] for problem in _exchange_kv(tiers[0], one)]
    yield from dict.fromkeys(found)  # a wrong option of `engine.args` is reported once


def shorter_prompts(fleet: FleetSpec) -> Iterator[str]:
    """Yield a sentence for each tier whose KV holds no prompt as long as `model.max_context`."""
    model, reserved = find_architecture(fleet.model.path), fleet.conversation.headroom_tokens
    for index, tier in enumerate(fleet.tiers):
        one = TierEngines(fleet, index, tier, model)
        longest, block = one.max_context, one.integer("block-size") or 16
        blocks = one.integer("num-gpu-blocks-override")
        fits = int(FILL * blocks * block) - reserved
        if blocks and fleet.policy.holds_conversations(tier.role) and fits < longest:
            yield (
                f"tier '{tier.name}': a prompt of more than {max(0, fits)} tokens is refused with 400: "
                f"conversations get {FILL:.0%} of the {blocks * block} that {blocks} blocks hold, and "
                f"{reserved} are reserved beside a prompt (conversation.headroom_tokens). For {longest} set "
                f"num-gpu-blocks-override: {ceil((longest + reserved) / FILL / block)}, or lower "
                "model.max_context"
            )


# Files that have parsers of other names.
PARSER_PLUGINS = {"tool-call-parser": "tool-parser-plugin", "reasoning-parser": "reasoning-parser-plugin"}


def _options(one: TierEngines) -> Iterator[Problem]:
    for name, value in one.args.items():
        plugin = PARSER_PLUGINS.get(name) in one.args
        if not plugin and (message := vllm_options.problem(name, value)):
            yield Problem(one.at(name), message, at_key=message.startswith(("vLLM has no", "written as")))


def _environment(one: TierEngines) -> Iterator[Problem]:
    blocks: tuple[tuple[KeyPath, dict[str, str]], ...] = (
        (("engine", "env"), one.fleet.engine.env),
        (("tiers", one.index, "env"), one.tier.env),
    )
    for path, env in blocks:
        for name, why in OUR_ENVIRONMENT.items():
            if name in env:
                yield Problem((*path, name), f"'{name}' is not set here: {why}; remove it", at_key=True)
        if env.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
            continue
        needs = "vLLM's V1 model runner: remove it, or set"
        if one.coserves:
            sentence = f"co-serving needs {needs} coserving.enabled: false"
            yield Problem((*path, "VLLM_USE_V2_MODEL_RUNNER"), sentence)
        if one.fleet.overload.policy == "drop":
            yield Problem(
                (*path, "VLLM_USE_V2_MODEL_RUNNER"), f"dropping needs {needs} overload.policy: park"
            )


def _gpus(one: TierEngines) -> Iterator[Problem]:
    hardware, path = one.tier.hardware, ("tiers", one.index, "hardware")
    name = hardware.accelerator
    if name is not None and name not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        yield Problem((*path, "accelerator"), f"unknown accelerator '{name}'; expected one of {known}")
    if not one.on_gpus:
        return
    gpus, given = one.parallel.gpus, one.tier.resources.get("GPU")
    product = f"tensor-parallel-size {one.parallel.tensor} x pipeline-parallel-size {one.parallel.pipeline}"
    if given is not None and given != gpus and (gpus > 1 or given > 1):
        yield Problem(
            ("tiers", one.index, "resources", "GPU"),
            f"an engine has {product} = {gpus} ranks and would take {given:g} GPUs: remove it (GPUs follow "
            f"from the ranks), or set tensor-parallel-size: {given:g}",
        )
    share, wanted = given if given is not None and given < 1 else 1.0, one.args.get("gpu-memory-utilization")
    if share < 1 and not (isinstance(wanted, float | int) and wanted <= share):
        yield Problem(
            one.at("gpu-memory-utilization")
            if wanted is not None
            else ("tiers", one.index, "resources", "GPU"),
            f"engines that take {share:g} of a GPU share its memory: set gpu-memory-utilization to {share:g} "
            f"or less (it is {0.92 if wanted is None else wanted})",
        )
    if gpus > hardware.node_gpus:
        yield Problem(
            one.at("tensor-parallel-size"),
            f"an engine is on one node: {product} = {gpus} GPUs, and a node has {hardware.node_gpus} "
            "(tiers.hardware.node_gpus): lower them, or quantise the model",
        )
    elif hardware.nodes is not None:
        there = hardware.nodes * (hardware.node_gpus // gpus)
        most = one.tier.autoscale.max if one.tier.autoscale else one.tier.replicas
        if share == 1.0 and most > there:
            key = ("autoscale", "max") if one.tier.autoscale else ("replicas",)
            yield Problem(
                ("tiers", one.index, *key),
                f"{most} engines of {gpus} GPUs do not fit {hardware.nodes} nodes of {hardware.node_gpus}: "
                f"at most {there}, or raise tiers.hardware.nodes",
            )


def _one_node(one: TierEngines) -> Iterator[Problem]:
    for name in NODES:
        if name in one.args:
            yield Problem(
                one.at(name),
                f"an engine is on one node, with co-serving and without: remove '{name}'; more nodes take "
                "more replicas",
                at_key=True,
            )
    if one.args.get("distributed-executor-backend") == "ray":
        yield Problem(
            one.at("distributed-executor-backend"),
            "an engine is on one node, and safepoints and the control socket need its shared memory: "
            "remove it (mp)",
        )
    for name in ("data-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size"):
        if one.integer(name) > 1:
            instead = f"replicas: {one.integer(name)}" if name.startswith("data") else "tensor-parallel-size"
            yield Problem(
                one.at(name), f"ranks of '{name}' hold KV that conversations are not bound to: use {instead}"
            )


def _power(one: TierEngines) -> Iterator[Problem]:
    cap, board = one.tier.power_cap_w, one.accelerator
    if cap is not None and board is not None and not board.power_w[0] <= cap <= board.power_w[1]:
        low, high = board.power_w
        yield Problem(
            ("tiers", one.index, "power_cap_w"),
            f"a {one.tier.hardware.accelerator} takes limits from {low} to {high} W, not {cap}",
        )


def _safepoint_layers(one: TierEngines) -> Iterator[Problem]:
    layers = one.model.layers if one.model is not None else 0
    if one.safepoints and 0 < layers <= one.fleet.coserving.safepoint_layers:
        yield Problem(
            ("coserving", "safepoint_layers"),
            f"the model has {layers} layers: no arrival would abort anything; expected fewer than that",
        )


def _positions(one: TierEngines) -> Iterator[Problem]:
    env = {**one.fleet.engine.env, **one.tier.env}
    stretched = any(name.split(".")[0] == "hf-overrides" for name in one.args)
    if one.model is None or stretched or env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return
    if 0 < one.model.max_context < one.max_context:
        yield Problem(
            ("model", "max_context"),
            f"the model has positions for {one.model.max_context} tokens, not for {one.max_context}: lower "
            "it, or stretch them with hf-overrides in engine.args, as recipes/qwen3-32b does",
        )


def _memory(one: TierEngines) -> Iterator[Problem]:
    model, board, ranks = one.model, one.accelerator, one.parallel
    longest = one.max_context
    block, blocks = one.integer("block-size") or 16, one.integer("num-gpu-blocks-override")
    if blocks and longest and blocks * block < longest:
        yield Problem(
            one.at("num-gpu-blocks-override"),
            f"{blocks} blocks of {block} tokens hold {blocks * block}, and one conversation may have "
            f"{longest}: expected at least {-(-longest // block)}, or a lower model.max_context",
        )
    if model is None or board is None or not one.on_gpus or not model.weight_bytes:
        return
    share = one.args.get("gpu-memory-utilization", 0.92)
    there = board.memory_gib * GIB * (share if isinstance(share, float | int) else 0.92)
    weights = model.weight_bytes / ranks.gpus
    if weights >= there:
        least = next((size for size in (2, 4, 8, 16) if model.weight_bytes / size < 0.9 * there), 16)
        yield Problem(
            one.at("tensor-parallel-size"),
            f"weights of {model.weight_bytes / GIB:.0f} GiB do not fit {ranks.gpus} x {there / GIB:.0f} GiB: "
            f"set tensor-parallel-size: {least}",
        )
        return
    kv = model.kv_bytes(longest, ranks.tensor, one.kv_width) / ranks.pipeline
    if kv > there - weights:
        fits = int(longest * (there - weights) / kv)
        yield Problem(
            ("model", "max_context") if one.fleet.model.max_context else ("model", "path"),
            f"the KV of a conversation of {longest} tokens takes {kv / GIB:.0f} GiB a GPU, and tier "
            f"'{one.tier.name}' has {(there - weights) / GIB:.0f} beside the weights: set model.max_context "
            f"to {fits} or less, or a larger tensor-parallel-size",
        )


STAGED_BLOCKS = 8  # transfers that are under way at once on each side; a block has all layers of a rank


def _staging(one: TierEngines) -> Iterator[Problem]:
    transfer, ranks = one.fleet.transfer, one.parallel
    if one.model is None or not (one.on_gpus and one.transfers and transfer.backend == "tcp"):
        return
    block = one.model.kv_bytes(one.integer("block-size") or 16, ranks.tensor, one.kv_width)
    least = STAGED_BLOCKS * block * ranks.gpus / GIB
    if transfer.staging_gib < least:
        yield Problem(
            ("transfer", "staging_gib"),
            f"an engine sends or receives {STAGED_BLOCKS} blocks or more at a time, of "
            f"{block / (1 << 20):.3g} MiB on each of {ranks.gpus} ranks: expected {least:.2g} or more",
        )


def _kv_type(one: TierEngines) -> Iterator[Problem]:
    kind = one.args.get("kv-cache-dtype", "auto")
    if kind not in KV_TYPES:
        yield Problem(
            one.at("kv-cache-dtype"),
            f"the connector does not move blocks of '{kind}': expected one of {', '.join(KV_TYPES)}",
        )


def _connector_limits(one: TierEngines) -> Iterator[Problem]:
    if one.args.get("enable-prefix-caching") is False and not one.fleet.model.embeddings:
        yield Problem(
            one.at("enable-prefix-caching"),
            "a conversation finds its KV by the prefix cache: remove it",
        )
    for name in ("enable-lora", "lora-modules"):
        if one.args.get(name):
            yield Problem(
                one.at(name),
                "adapters are not served: a fleet has one model; merge the adapter and set model.path",
                at_key=True,
            )
    if one.transfers and one.parallel.pipeline > 1:
        yield Problem(
            one.at("pipeline-parallel-size"),
            "stages of a pipeline do not transfer layers: use tensor-parallel-size, or policy: collocated",
        )
    model = one.model
    if model is None:
        return
    if model.states:
        yield from _states(one, model)
    if model.latent_dim and not one.on_gpus:
        yield Problem(
            ("model", "path"),
            "vLLM's CPU build computes no prompt of this model (latent attention) after cached KV: "
            "answers after a transfer would be wrong; serve it on GPUs",
        )
    if not model.layer_hooks and one.safepoints:
        yield Problem(
            ("model", "path"),
            "vLLM does not call connectors between this model's layers, so that no arrival would abort "
            "anything: set coserving.safepoints: false",
        )


def _states(one: TierEngines, model: Architecture) -> Iterator[Problem]:
    """Yield settings that cannot work with a model that has layers with a state instead of KV."""
    path = ("model", "path")
    if not model.heads:
        yield Problem(path, "no layer of this model has attention, which vLLM's prefix cache asks for")
    if one.fleet.coserving.enabled:
        message = "a step overwrites this model's states, and cannot be undone: set coserving.enabled: false"
        yield Problem(("coserving", "enabled"), message)
    if one.transfers and one.fleet.transfer.backend == "nixl":
        yield Problem(path, "states of this model are moved by us, not by NIXL: set transfer.backend: tcp")
    if "lmcache" in one.fleet.kv.kv_tiers:
        yield Problem(path, "states of this model are not stored in LMCache: remove it from kv.kv_tiers")
    if one.args.get(WHOLE_WINDOWS) is True:
        yield Problem(one.at(WHOLE_WINDOWS), "states have blocks of their own: remove it", at_key=True)


def _coserving_limits(one: TierEngines) -> Iterator[Problem]:
    if speculates(one.args) and (one.coserves or one.transfers):
        name = next(name for name in SPECULATIVE if name in one.args)
        what = "co-serving" if one.coserves else "the transfer"
        yield Problem(
            one.at(name), f"{what} does not know the tokens of a draft: remove '{name}' here", at_key=True
        )
    if not one.coserves:
        return
    wrong = {
        "scheduling-policy": (
            one.args.get("scheduling-policy", "priority") != "priority",
            "offline requests are distinguished from conversations by their priority",
        ),
        "pipeline-parallel-size": (one.parallel.pipeline > 1, "only one step may run at a time"),
        "enable-dbo": (
            bool(one.args.get("enable-dbo")),
            "a step in two halves cannot be left between layers",
        ),
        "compilation-config": (
            one.safepoints and _only_full_graphs(one.args),
            "without piecewise graphs a step that may be aborted has none (use FULL_AND_PIECEWISE, or "
            "coserving.safepoints: false)",
        ),
    }
    for name, (is_wrong, why) in wrong.items():
        if is_wrong:
            path = next((key for key in one.args if key.split(".")[0] == name), name)
            yield Problem(one.at(path), f"co-serving does not work with this '{path}': {why}; remove it")
    text_only = one.args.get("language-model-only") is True
    if one.model is not None and one.model.multimodal and one.safepoints and not text_only:
        yield Problem(
            ("coserving", "safepoints"),
            "an aborted step would have to give back encoded images: set coserving.safepoints: false, or "
            "language-model-only: true in engine.args",
        )


SPECULATIVE = ("speculative-config", "spec-method", "spec-model", "spec-tokens")


def speculates(args: Mapping[str, Any]) -> bool:
    return any(args.get(name) for name in SPECULATIVE)


def _only_full_graphs(args: dict[str, Any]) -> bool:
    config = args.get("compilation-config")
    inner = config.get("cudagraph_mode") if isinstance(config, dict) else config
    modes = f"{inner} {args.get('compilation-config.cudagraph_mode')}".upper()
    return "FULL" in modes and "PIECEWISE" not in modes


def _exchange_kv(first: TierEngines, one: TierEngines) -> Iterator[Problem]:
    """Yield what prevents the engines of two tiers from exchanging KV."""
    for name in SAME_KV:
        if first.args.get(name) != one.args.get(name):
            yield Problem(
                one.at(name) if name in one.args else first.at(name),
                f"tiers '{first.tier.name}' and '{one.tier.name}' exchange KV and differ in '{name}' "
                f"({_shown(first, name)} and {_shown(one, name)}): set it once, in engine.args",
            )
    here, there = first.parallel.tensor, one.parallel.tensor
    nixl = one.fleet.transfer.backend == "nixl"
    if here != there and not (nixl and max(here, there) % min(here, there) == 0):
        instead = "sizes of which one divides the other" if nixl else "one size, or transfer.backend: nixl"
        yield Problem(
            one.at("tensor-parallel-size"),
            f"tier '{first.tier.name}' has tensor-parallel-size {here} and '{one.tier.name}' {there}: the "
            f"transfer does not cut heads anew; expected {instead}",
        )


def _shown(one: TierEngines, name: str) -> str:
    return str(one.args.get(name, "not set"))


CHECKS: tuple[Callable[[TierEngines], Iterator[Problem]], ...] = (
    *(_options, _environment, _gpus, _one_node, _power),
    *(_safepoint_layers, _positions, _memory, _staging, _kv_type),
    *(_connector_limits, _coserving_limits),
)
