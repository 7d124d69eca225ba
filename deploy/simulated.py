"""A fleet file as the simulator sees it."""

from dataclasses import replace

from deploy.fleet.rooms import placer_settings
from deploy.fleet.schema import Fleet as FleetFile
from traces.simulator.entities.kv import Pressure
from traces.simulator.policies import System, SystemSettings
from traces.simulator.profile import EngineProfile, Fleet, Tier
from traces.simulator.simulation import SimulationSettings

PROFILE_OF_DEVICE = {"cpu": "laptop", "cuda": "a40-qwen3-0.6b"}


def simulated(file: FleetFile, profile: EngineProfile) -> Fleet:
    """Tiers of the file; what its arguments say about chunks and KV goes before the profile."""
    tiers = []
    for tier in file.tiers:
        engine = _with_arguments(profile, file.engine.args | tier.args)
        if tier.power_cap_w is not None:
            engine = engine.capped(tier.power_cap_w)
        tiers.append(Tier(tier.name, tier.role, tier.replicas, engine))
    return Fleet(tuple(tiers))


def settings(file: FleetFile, system: System | None, error_rate: float, seed: int) -> SimulationSettings:
    """The file's own policy, unless another system is to be tried on the same fleet."""
    prefixes = [(file.engine.args | tier.args).get("enable-prefix-caching") for tier in file.tiers]
    return SimulationSettings(
        SystemSettings(system or System(file.policy), error_rate=error_rate),
        placer_settings(file),
        pressure=Pressure.PARK,
        park_after_s=file.conversation.park_after,
        linger_s=file.conversation.ttl,
        prefillers_cache=all(cached is not False for cached in prefixes),  # vLLM's default
        seed=seed,
    )


def _with_arguments(profile: EngineProfile, args: dict[str, object]) -> EngineProfile:
    chunk, blocks, block = (
        args.get(name) for name in ("max-num-batched-tokens", "num-gpu-blocks-override", "block-size")
    )
    if isinstance(chunk, int):
        profile = replace(profile, chunk_tokens=chunk)
    if isinstance(blocks, int) and isinstance(block, int):
        profile = replace(profile, kv_tokens=blocks * block)
    return profile
