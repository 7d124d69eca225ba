"""Checks of the overload policy: settings that contradict it, and engines that cannot drop parameters."""

from collections.abc import Iterator, Mapping

from deploy.errors import Problem
from deploy.fleet.engine_arguments import arguments, parallel
from deploy.fleet.model_architecture import find_architecture
from deploy.fleet.schema import FleetSpec, TierSpec
from placement.engines import Role
from workers.engine.overload.config import SPLIT_MODELS


def in_the_way(fleet: FleetSpec, tier: TierSpec) -> Iterator[str]:
    """Yield each reason why engines of `tier` cannot drop parameters."""
    given = arguments(fleet, tier)
    ranks = parallel(fleet, tier)
    if ranks.gpus > 1:
        yield f"its engines have {ranks.gpus} ranks"
    if quantization := given.get("quantization"):
        yield f"quantization '{quantization}' may pack weights so that they cannot come back"
    if compiled := _compiled(fleet, given):
        yield compiled
    if given.get("speculative-config") or given.get("enable-lora"):
        yield "speculative decoding and LoRA have parameters beside the layers"


def _compiled(fleet: FleetSpec, given: Mapping[str, object]) -> str:
    """Return why an engine with these options cannot drop parameters because of its CUDA graphs; else empty.

    While engines share layers, they leave piecewise graphs unused, but a full graph would run all layers.
    """
    if given.get("enforce-eager"):
        return ""
    if fleet.engine.device == "cpu":
        return "a compiled pass has all layers in it: set enforce-eager: true under engine.args"
    config = given.get("compilation-config")
    mode = config.get("cudagraph_mode") if isinstance(config, dict) else None
    mode = given.get("compilation-config.cudagraph_mode", mode)
    if mode is not None and str(mode).upper() in ("NONE", "PIECEWISE"):  # vLLM's default has full graphs
        return ""
    return (
        "a full CUDA graph has all layers in it: set compilation-config.cudagraph_mode: PIECEWISE, "
        "or enforce-eager: true, under engine.args"
    )


def model_in_the_way(fleet: FleetSpec) -> Iterator[str]:
    """Yield each reason in config.json why the model cannot be split; engines find all other reasons."""
    model = find_architecture(fleet.model.path)
    if model is None:
        return
    instead = "set overload.policy: park"
    if model.names and not set(model.names) & set(SPLIT_MODELS):
        yield (
            f"models that it can split are {', '.join(SPLIT_MODELS)}, and this one is "
            f"{', '.join(model.names)}: {instead}"
        )
    elif model.layer_kinds > 1 or model.states:
        yield f"some of its layers have windows or states, and only layers all alike are split: {instead}"


def check_overload(fleet: FleetSpec) -> Iterator[Problem]:
    if fleet.overload.policy == "drop":
        yield from _drop(fleet)
    elif fleet.overload.policy != "park":
        yield from _without_parking(fleet)


def _without_parking(fleet: FleetSpec) -> Iterator[Problem]:
    """Yield a problem for each setting of parking in a fleet whose overload policy does not park."""
    policy = fleet.overload.policy
    settings = {
        ("kv", "host_kv_gib"): "host_kv_gib" in fleet.kv.model_fields_set,
        ("kv", "disk_gib"): bool(fleet.kv.disk_gib),
        ("kv", "kv_tiers"): "kv_tiers" in fleet.kv.model_fields_set and bool(fleet.kv.kv_tiers),
        ("conversation", "park_after"): "park_after" in fleet.conversation.model_fields_set,
    }
    for path, given in settings.items():
        if given:
            yield Problem(
                path,
                f"nothing is parked with overload.policy '{policy}': take this out, or set policy: park",
                at_key=True,
            )


def _drop(fleet: FleetSpec) -> Iterator[Problem]:
    path = ("overload", "policy")
    holders = [tier for tier in fleet.tiers if tier.role is not Role.PREFILL]
    found = [f"tier '{tier.name}': {why}" for tier in holders for why in in_the_way(fleet, tier)]
    if all(max(tier.replicas, tier.autoscale.max if tier.autoscale else 0) < 2 for tier in holders):
        found.append("engines of one tier that holds conversations share their layers: no tier has two")
    if fleet.transfer.backend == "nixl":
        found.append("NIXL has the KV registered as it was at the start: set transfer.backend: tcp")
    if "lmcache" in fleet.kv.kv_tiers:
        found.append("LMCache reads KV of all layers from one engine: take it out of kv.kv_tiers")
    if fleet.model.embeddings:
        found.append("a model that makes embeddings holds no KV")
    found += model_in_the_way(fleet)
    yield from (Problem(path, f"'drop' does not work here: {why}") for why in found)
