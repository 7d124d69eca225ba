"""What each room gets from a fleet file, as that room's own frozen configuration."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.fleet.schema import SMALL_MODEL, Autoscale, Fleet, Tier
from deploy.home import POWER, PROFILES, FleetHome, conserve_home
from kvtransfer.config import ConnectorConfig
from placement.advice import Thresholds
from placement.autoscaling import ScaleLimits
from placement.curve import PrefillCurve
from placement.engines import Role
from placement.placer import PlacerSettings
from placement.policies import PlacingPolicy
from placement.redisaggregation import Redisaggregation
from placement.serving import ServingSettings
from placement.serving.state import Slo as ServingSlo
from router.batch.config import BatchConfig, BatchLimits, DispatchSettings
from router.config import GatewayConfig, Handover, Model, Slo, Tracing
from router.directory.capacity import CapacitySettings
from router.directory.server import DirectorySettings
from router.directory.table import TableSettings
from router.http import ServerLimits, UpstreamLimits
from workers.command import FLEET_MARK
from workers.coserving.config import (
    CPU_WORKER_CLASS,
    SAFEPOINT_PART,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)
from workers.lmcache_server import LmcacheServer
from workers.power.keeping import PowerSettings
from workers.spec import PLAIN_CPU_WORKER, Device, EngineSpec, KeeperSettings

DEFAULT_BLOCK_TOKENS = 16  # vLLM's, on GPUs

# Until a tier is profiled: an 8B model on one GPU, the small model on one core. Too slow a guess refuses
# early, too fast a guess queues longer than promised; the placer corrects neither.
GUESSED_CURVES = {
    Device.CPU: PrefillCurve(0.03, 3e-4, 1e-8),
    Device.CUDA: PrefillCurve(0.02, 1e-4, 1e-9),
}


@dataclass(frozen=True, slots=True)
class EngineName:
    name: str
    tier: Tier


def engines(fleet: Fleet) -> Iterator[EngineName]:
    for tier in fleet.tiers:
        for index in range(tier.replicas):
            yield EngineName(f"{tier.name}-{index}", tier)


def engine_spec(fleet: Fleet, engine: EngineName, home: FleetHome, host: str) -> EngineSpec:
    tier = engine.tier
    coserves = fleet.coserving.enabled and tier.role is not Role.PREFILL
    additional = json.dumps(coserving(fleet).to_additional_config()) if coserves else None
    trace_options, trace_env = _engine_tracing(fleet, engine)
    options = {**trace_options, **fleet.engine.args, **tier.args}
    env = {**trace_env, **fleet.engine.env, **tier.env, FLEET_MARK: home.mark}
    return EngineSpec(
        engine=engine.name,
        tier=tier.name,
        role=tier.role,
        model=model_path(fleet, home),
        served_name=fleet.model.name,
        device=Device(fleet.engine.device),
        directory=home.engine(engine.name),
        host=host,
        dtype=fleet.model.dtype,
        max_context=fleet.model.max_context,
        threads=fleet.engine.threads,
        options=tuple(sorted(options.items())),
        env=tuple(sorted(env.items())),
        connector=connector(fleet, coserves),
        scheduler_class=SCHEDULER_CLASS if coserves else None,
        worker_class=_worker_class(Device(fleet.engine.device), coserves),
        additional=additional,
    )


def _engine_tracing(fleet: Fleet, engine: EngineName) -> tuple[dict[str, str], dict[str, str]]:
    """vLLM's own spans, of the turns that a gateway samples and of no others."""
    tracing = fleet.observe.tracing
    if tracing is None:
        return {}, {}
    return {"otlp-traces-endpoint": f"{tracing.endpoint.rstrip('/')}/v1/traces"}, {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_SERVICE_NAME": f"conserve-{engine.name}",
    }


def _worker_class(device: Device, coserves: bool) -> str | None:
    """vLLM's own where nothing of ours is needed."""
    if device is Device.CPU:
        return CPU_WORKER_CLASS if coserves else PLAIN_CPU_WORKER
    return WORKER_CLASS if coserves else None


def power_settings(fleet: Fleet, engine: EngineName, home: FleetHome, gpus: tuple[str, ...]) -> PowerSettings:
    lease = fleet.engine.lease
    # What a CPU engine sees without having asked for it is somebody else's.
    its_own = fleet.engine.device == "cuda" or "GPU" in engine.tier.resources
    return PowerSettings(
        engine=engine.name,
        role=engine.tier.role.value,
        gpus=gpus if its_own else (),
        cap_w=engine.tier.power_cap_w,
        record=home.root.parent.parent / POWER,
        grace_s=lease + 30.0,  # a keeper restarted within the lease adopts the engine and its cap
    )


def model_path(fleet: Fleet, home: FleetHome) -> str:
    if fleet.model.path == SMALL_MODEL:
        return str(home.model)
    path = Path(fleet.model.path).expanduser()
    return str(path.resolve()) if path.is_dir() else fleet.model.path


def coserving(fleet: Fleet) -> CoServingConfig:
    block = fleet.coserving
    serving = ServingSettings(
        policy=block.policy,
        slo=ServingSlo(ttft_s=block.ttft, tbt_s=block.tbt),
        margin=block.margin,
        safepoints=block.safepoints,
        offline_share=block.offline_share,
    )
    profiles = str(conserve_home() / PROFILES)
    return CoServingConfig(serving=serving, safepoint_every=block.safepoint_layers, profiles=profiles)


def connector(fleet: Fleet, coserves: bool) -> ConnectorConfig:
    return ConnectorConfig(
        parts=(SAFEPOINT_PART,) if coserves else (),
        transfer=fleet.policy != "collocated",
        backend=fleet.transfer.backend,
        lease_s=fleet.transfer.lease,
        timeout_s=fleet.transfer.timeout,
        park_after_s=fleet.conversation.park_after,
        ttl_s=fleet.conversation.ttl + 60.0,  # the directory ends a conversation; this is for what it missed
        host_kv_gib=fleet.kv.host_kv_gib if "host" in fleet.kv.kv_tiers else 0.0,
        lmcache_timeout_s=fleet.kv.lmcache.timeout,
    )


def shared_tier(fleet: Fleet, engine: EngineName, home: FleetHome) -> LmcacheServer | None:
    """This node's, which every keeper of a decoder keeps alive."""
    if "lmcache" not in fleet.kv.kv_tiers or engine.tier.role is Role.PREFILL:
        return None
    block_tokens = {**fleet.engine.args, **engine.tier.args}.get("block-size", DEFAULT_BLOCK_TOKENS)
    return LmcacheServer(home.engines / "lmcache", fleet.kv.lmcache.gib, int(block_tokens), home.mark)


def keeper_settings(fleet: Fleet) -> KeeperSettings:
    engine = fleet.engine
    together = engine.start_together or (1 if engine.device == "cpu" else None)
    return KeeperSettings(
        start_together=together,
        start_limit_s=engine.start_limit,
        stall_limit_s=engine.stall_limit,
        health_interval_s=engine.health_interval,
        health_misses=engine.health_misses,
        lease_s=engine.lease,
    )


def placer_settings(fleet: Fleet) -> PlacerSettings:
    return PlacerSettings(
        policy=PlacingPolicy(fleet.policy),
        headroom_tokens=fleet.conversation.headroom_tokens,
        capacity_window_s=fleet.capacity.window,
        max_prefill_wait_s=fleet.conversation.prefiller_wait,
        shared_tier="lmcache" in fleet.kv.kv_tiers,
        redisaggregation=Redisaggregation(
            above_tokens=fleet.conversation.redisaggregate_tokens,
            min_share=fleet.conversation.redisaggregate_share,
        ),
    )


def prefill_curves(fleet: Fleet) -> Mapping[str, PrefillCurve]:
    guess = GUESSED_CURVES[Device(fleet.engine.device)]
    curves = {}
    for tier in fleet.tiers:
        curve = tier.prefill_curve
        curves[tier.name] = PrefillCurve(curve.a, curve.b, curve.c) if curve else guess
    return curves


def directory_settings(fleet: Fleet) -> DirectorySettings:
    return DirectorySettings(
        table=TableSettings(ttl_s=fleet.conversation.ttl),
        settle_s=fleet.engine.lease,
        capacity=CapacitySettings(
            thresholds=thresholds(fleet),
            longest_prefill_wait_s=fleet.conversation.prefiller_wait,
            prefills=fleet.policy != "collocated",
        ),
    )


def thresholds(fleet: Fleet) -> Thresholds:
    return Thresholds(fleet.capacity.high, fleet.capacity.target, fleet.capacity.low)


def scale_limits(fleet: Fleet, autoscale: Autoscale) -> ScaleLimits:
    return ScaleLimits(
        least=autoscale.min,
        most=autoscale.max,
        thresholds=thresholds(fleet),
        cool_down_s=fleet.capacity.cool_down,
        calm_s=fleet.capacity.calm,
    )


def gateway_config(fleet: Fleet, home: FleetHome, name: str, directory: str, secret: str) -> GatewayConfig:
    gateway, limits = fleet.gateway, fleet.gateway.limits
    slo = fleet.slos["default"]
    return GatewayConfig(
        directory=directory,
        directory_secret=secret,
        models=(Model(name=fleet.model.name),),
        fleet=fleet.name,
        name=name,
        batch=batch_config(fleet, home) if fleet.batch.enabled else None,
        host=gateway.host,
        port=gateway.port,
        reuse_port=True,  # a changed gateway listens before the old one ends
        metrics_host=directory.rpartition(":")[0],  # the directory's machine is the gateways'
        policy=PlacingPolicy(fleet.policy),
        handover=Handover.IN_TURN if fleet.transfer.backend == "nixl" else Handover.TOGETHER,
        redisaggregate_tokens=fleet.conversation.redisaggregate_tokens,
        redisaggregate_share=fleet.conversation.redisaggregate_share,
        place_wait_s=fleet.conversation.decoder_wait,
        tracing=_tracing(fleet),
        slo=Slo(ttfet_s=slo.ttfet, last_turn_tbt_s=slo.last_turn_tbt, e2e_s=slo.e2e),
        api_keys=tuple(gateway.api_keys),
        admin_keys=tuple(gateway.admin_keys),
        limits=ServerLimits(
            max_connections=limits.connections,
            max_headers=limits.headers,
            max_head_bytes=limits.header_kib << 10,
            max_body_bytes=int(limits.body_mib * (1 << 20)),
            head_timeout_s=limits.request_timeout,
            body_timeout_s=limits.request_timeout,
            write_stall_s=limits.idle_timeout,
        ),
        upstream=UpstreamLimits(
            first_byte_timeout_s=limits.first_token_timeout, chunk_timeout_s=limits.idle_timeout
        ),
    )


def _tracing(fleet: Fleet) -> Tracing | None:
    tracing = fleet.observe.tracing
    return Tracing(tracing.endpoint, tracing.sample) if tracing else None


def batch_config(fleet: Fleet, home: FleetHome) -> BatchConfig:
    batch = fleet.batch
    return BatchConfig(
        store_url=batch.database or f"sqlite:///{home.batch / 'batch.sqlite'}",
        files_url=batch.files or str(home.batch / "files"),
        limits=BatchLimits(
            file_bytes=int(batch.max_file_mib * (1 << 20)), requests_per_batch=batch.max_requests
        ),
        dispatch=DispatchSettings(
            max_in_flight=batch.in_flight_per_engine,
            harvest_prefill=batch.harvest_prefill,
            keep_free_fraction=batch.keep_free,
        ),
        file_ttl_s=int(batch.file_ttl) if batch.file_ttl else None,
    )
