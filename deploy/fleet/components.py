"""Makes the configuration of each component from a fleet file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from deploy.fleet.engine_arguments import arguments, coserves_on
from deploy.fleet.schema import AutoscaleSpec, FleetSpec, Spec, TierSpec
from deploy.home import POWER, FleetHome, FleetKeys, Purpose
from deploy.models import smollm2
from deploy.models.built_in import model_path, parsers
from kvtransfer.config import ConnectorConfig
from placement.engines import Role
from placement.overload.drop_plan import DropLimits
from placement.prefetch_rules import PrefetchRules
from placement.routing.placer_settings import PlacerSettings, Redisaggregation
from placement.scheduling.interface import ServingSettings
from placement.scheduling.interface import TurnTargets as ServingSlo
from placement.scheduling.prefill_curve import PrefillCurve
from placement.sizing.autoscaling import ScaleLimits
from placement.sizing.capacity import Thresholds
from router.auth.keys import StructuredOutputs, inline_keys
from router.batch.config import BatchConfig, BatchLimits, DispatchSettings
from router.directory.directory import DirectorySettings
from router.gateway.config import BatchAddress, GatewayConfig, Handover, ServedModel
from router.http import ServerLimits
from router.identity.conversation_ids import namespace
from router.identity.prefix_groups import EVERYBODY
from router.settings import MIB
from workers.engine.coserving.config import (
    PROMPT_SCHEDULER,
    SAFEPOINT_PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)
from workers.engine.overload.config import (
    OVERLOAD_PLUGIN,
)
from workers.keeper.config import KeeperSettings
from workers.keeper.launch import FLEET_MARK, Device, EngineKeys, LaunchSpec
from workers.keeper.lmcache_server import LmcacheServer
from workers.power.engine_power import PowerSettings

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_BLOCK_TOKENS = 16  # vLLM's, on GPUs

# Speed of prefillers until they report it: an 8B model on one GPU, the small model on one core. The speed of
# decoders is not guessed: they compute first turns once they, or decoders like them, have computed a prompt.
GUESSED_CURVES = {
    Device.CPU: PrefillCurve(0.03, 3e-4, 1e-8),
    Device.CUDA: PrefillCurve(0.02, 1e-4, 1e-9),
}

Config = TypeVar("Config")


def configured(kind: type[Config], *blocks: Spec, **given: Any) -> Config:
    """Return a `kind` made of the `given` fields, and of each key in `blocks` that has a field's name.

    A field in seconds ends in `_s`, but its key does not. All other fields keep their defaults.
    """
    values = {}
    for block in blocks:
        for field in fields(kind):  # type: ignore[arg-type]
            for key in {field.name, field.name.removesuffix("_s")} & type(block).model_fields.keys():
                values[field.name] = getattr(block, key)
    return kind(**{**values, **given})


@dataclass(frozen=True, slots=True)
class EngineName:
    name: str
    tier: TierSpec


def engines(fleet: FleetSpec) -> Iterator[EngineName]:
    for tier in fleet.tiers:
        for index in range(tier.replicas):
            yield EngineName(f"{tier.name}-{index}", tier)


def engine_keys(keys: FleetKeys) -> EngineKeys:
    return EngineKeys(keys.of(Purpose.ENGINES), keys.of(Purpose.TRANSFER))


def engine_spec(fleet: FleetSpec, engine: EngineName, home: FleetHome, host: str) -> LaunchSpec:
    tier, device = engine.tier, fleet.engine.device
    coserves = coserves_on(fleet, tier.role)
    needs_worker = coserves or drops_on(fleet, tier.role) or device is Device.CPU  # else vLLM's own does
    trace_options, trace_env = _engine_tracing(fleet, engine)
    options = {**trace_options, **_model_options(fleet), **arguments(fleet, tier)}
    if "tool-call-parser" in options:
        options.setdefault("enable-auto-tool-choice", True)
    env = {**trace_env, **fleet.engine.env, **tier.env, FLEET_MARK: home.mark}
    return configured(
        LaunchSpec,
        *(fleet.model, fleet.engine, tier),
        engine=engine.name,
        tier=tier.name,
        model=model_path(fleet, home),
        served_name=fleet.model.name,
        device=device,
        directory=home.engine(engine.name),
        host=host,
        options=tuple(sorted(options.items())),
        env=tuple(sorted(env.items())),
        connector=connector(fleet, tier.role),
        scheduler_class=_scheduler_class(fleet, coserves),
        worker_class=WORKER_CLASS if needs_worker else None,
        additional=json.dumps(coserving(fleet).to_additional_config()),
    )


def _scheduler_class(fleet: FleetSpec, coserves: bool) -> str | None:
    if fleet.model.embeddings:
        return None  # vLLM's own: there are no tokens to wait for, and some of these prompts may not be cut
    return SCHEDULER_CLASS if coserves else PROMPT_SCHEDULER


def _engine_tracing(fleet: FleetSpec, engine: EngineName) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options and environment with which vLLM sends spans of turns that gateways sample."""
    tracing = fleet.observe.tracing
    if tracing is None:
        return {}, {}
    return {"otlp-traces-endpoint": tracing.traces_endpoint}, {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc" if tracing.protocol == "grpc" else "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_SERVICE_NAME": f"conserve-{engine.name}",
    }


def _model_options(fleet: FleetSpec) -> dict[str, object]:
    answers = () if fleet.model.embeddings else parsers(fleet.model.path)
    options: dict[str, object] = {one.option: one.parser for one in answers if one.parser}
    if fleet.model.path == smollm2.NAME and (fleet.model.max_context or 0) > smollm2.TRAINED_CONTEXT:
        options["hf-overrides"] = smollm2.stretched(fleet.model.max_context or 0)
    if fleet.model.aliases:
        options["served-model-name"] = [fleet.model.name, *fleet.model.aliases]
    if fleet.model.embeddings:
        options["runner"] = "pooling"
    return options


def has_safepoints(fleet: FleetSpec) -> bool:
    return fleet.coserving.safepoints and fleet.coserving.policy == "conserve"


def coserving(fleet: FleetSpec) -> CoServingConfig:
    block = fleet.coserving
    return CoServingConfig(
        serving=configured(ServingSettings, block, slo=ServingSlo(ttft_s=block.ttft, tbt_s=block.tbt)),
        safepoint_every=block.safepoint_layers,
    )


def drops_on(fleet: FleetSpec, role: Role) -> bool:
    """Return whether engines of `role` may drop parameters, which only engines with conversations do."""
    return fleet.overload.policy == "drop" and role is not Role.PREFILL


def parks(fleet: FleetSpec) -> bool:
    """Return whether idle conversations may be parked on the host."""
    return fleet.overload.policy in ("park", "drop")


def keeps_on_host(fleet: FleetSpec) -> bool:
    return "host" in fleet.kv.kv_tiers and parks(fleet)


def connector(fleet: FleetSpec, role: Role) -> ConnectorConfig:
    coserves, transfer = coserves_on(fleet, role), fleet.policy.disaggregates
    publishes = transfer and role is Role.PREFILL and fleet.transfer.backend == "tcp"
    return configured(
        ConnectorConfig,
        *(fleet.transfer, fleet.conversation),
        plugins=(
            *((SAFEPOINT_PLUGIN,) if coserves else ()),
            *((OVERLOAD_PLUGIN,) if drops_on(fleet, role) else ()),
        ),
        transfer=transfer,
        layer_hooks=publishes or (coserves and has_safepoints(fleet)),
        ttl_s=fleet.conversation.ttl + 60.0,  # later than the directory, which normally ends a conversation
        host_kv_gib=fleet.kv.host_kv_gib if keeps_on_host(fleet) else 0.0,
        disk_gib=fleet.kv.disk_gib if keeps_on_host(fleet) else 0.0,
        disk_path=fleet.kv.disk_path,
        idle_kv_evictable=fleet.overload.policy == "preempt",
        lmcache_timeout_s=fleet.kv.lmcache.timeout,
    )


def shared_tier(fleet: FleetSpec, engine: EngineName, home: FleetHome) -> LmcacheServer | None:
    """Return the LMCache server that a decoder's keeper runs; None for a prefiller or without LMCache."""
    if "lmcache" not in fleet.kv.kv_tiers or engine.tier.role is Role.PREFILL:
        return None
    block_tokens = arguments(fleet, engine.tier).get("block-size", DEFAULT_BLOCK_TOKENS)
    return LmcacheServer(home.engines / "lmcache", fleet.kv.lmcache.gib, int(block_tokens), home.mark)


def keeper_settings(fleet: FleetSpec) -> KeeperSettings:
    together = fleet.engine.start_together or (1 if fleet.engine.device is Device.CPU else None)
    return configured(
        KeeperSettings,
        fleet.engine,
        start_together=together,
        kv_gib=_kv_in_host_memory(fleet),
        drain_s=fleet.capacity.drain,
    )


def _kv_in_host_memory(fleet: FleetSpec) -> float:
    """Return how many GiB of KV an engine may keep in host memory; infinity on a CPU without a limit."""
    parked = fleet.kv.host_kv_gib if "host" in fleet.kv.kv_tiers else 0.0
    if fleet.engine.device is not Device.CPU:
        return parked
    limits = [{**fleet.engine.env, **tier.env}.get("VLLM_CPU_KVCACHE_SPACE", "inf") for tier in fleet.tiers]
    try:
        return parked + max(map(float, limits))
    except ValueError:
        return parked  # vLLM will refuse that value


def power_settings(
    fleet: FleetSpec, engine: EngineName, home: FleetHome, gpus: tuple[str, ...]
) -> PowerSettings:
    # A keeper restarted within the lease adopts the engine and its cap. GPUs that an engine on CPUs sees
    # without having asked for them belong to others.
    its_own = fleet.engine.device is Device.CUDA or "GPU" in engine.tier.resources
    return PowerSettings(
        engine=engine.name,
        role=engine.tier.role.value,
        gpus=gpus if its_own else (),
        cap_w=engine.tier.power_cap_w,
        record=home.root.parent.parent / POWER,
        grace_s=fleet.engine.lease + 30.0,
    )


def placer_settings(fleet: FleetSpec) -> PlacerSettings:
    times = fleet.conversation
    return configured(
        PlacerSettings,
        times,
        policy=fleet.policy,
        first_turns=fleet.placement.first_turns,
        relieve_hot=fleet.placement.relieve_hot,
        roles=fleet.placement.roles,
        capacity_window_s=fleet.capacity.window,
        max_prefill_wait_s=times.prefiller_wait,
        ttft_s=fleet.coserving.ttft,
        shared_tier="lmcache" in fleet.kv.kv_tiers,
        redisaggregation=redisaggregation(fleet),
    )


def redisaggregation(fleet: FleetSpec) -> Redisaggregation:
    conversation = fleet.conversation
    return Redisaggregation(conversation.redisaggregate_tokens, conversation.redisaggregate_share)


def prefill_curves(fleet: FleetSpec) -> Mapping[str, PrefillCurve]:
    guess = GUESSED_CURVES[fleet.engine.device]
    return {tier.name: guess for tier in fleet.tiers if tier.role is not Role.DECODE}


def alike(fleet: FleetSpec) -> Mapping[str, str]:
    """Return each tier's group; tiers of the same group are assumed to compute prompts equally fast."""
    on_cpu = fleet.engine.device is Device.CPU
    return {
        tier.name: f"{tier.hardware.accelerator} {tier.power_cap_w} {tier.args} {tier.env}"
        for tier in fleet.tiers
        if on_cpu or tier.hardware.accelerator
    }


def thresholds(fleet: FleetSpec) -> Thresholds:
    return configured(Thresholds, fleet.capacity)


def directory_settings(fleet: FleetSpec) -> DirectorySettings:
    dropping = DropLimits(fleet.coserving.tbt) if fleet.overload.policy == "drop" else None
    return DirectorySettings(
        fleet.conversation.ttl, thresholds(fleet), settle_s=fleet.engine.lease, dropping=dropping
    )


def scale_limits(fleet: FleetSpec, autoscale: AutoscaleSpec) -> ScaleLimits:
    return configured(
        ScaleLimits, fleet.capacity, least=autoscale.min, most=autoscale.max, thresholds=thresholds(fleet)
    )


def gateway_config(
    fleet: FleetSpec, name: str, directory: str, keys: FleetKeys, batch: str, answers: str = ""
) -> GatewayConfig:
    """Return the configuration of gateway `name`.

    `directory` and `batch` are host:port of these processes, `answers` is the default file of stored answers.
    """
    return configured(
        GatewayConfig,
        fleet.gateway,
        keys=inline_keys(fleet.gateway.api_keys, fleet.gateway.admin_keys),
        directory=directory,
        directory_secret=keys.of(Purpose.DIRECTORY),
        engine_key=keys.of(Purpose.ENGINES),
        models=_models(fleet),
        fleet=fleet.name,
        name=name,
        batch=_batch_address(fleet, batch, keys) if fleet.batch.enabled else None,
        reuse_port=True,  # a gateway's successor listens before the gateway ends
        metrics_host=directory.rpartition(":")[0],  # the directory's machine is the gateways'
        policy=fleet.policy,
        handover=Handover.IN_TURN if fleet.transfer.backend == "nixl" else Handover.TOGETHER,
        redisaggregation=redisaggregation(fleet),
        place_wait_s=fleet.conversation.decoder_wait,
        longest_ttl_s=max(fleet.conversation.longest_ttl, fleet.conversation.ttl),
        prefetch=PrefetchRules(park_after_s=fleet.conversation.park_after),
        shared_prefixes=owners(fleet, fleet.gateway.shared_prefixes),
        hosts=_hosts(fleet),
        audit=fleet.observe.audit,
        answers=replace(fleet.gateway.answers, path=fleet.gateway.answers.path or answers),
        tracing=fleet.observe.tracing,
        slos={name: replace(slo, owners=owners(fleet, slo.owners)) for name, slo in fleet.slos.items()},
        ttft_s=fleet.coserving.ttft,
        tbt_s=fleet.coserving.tbt,
    )


def _batch_address(fleet: FleetSpec, address: str, keys: FleetKeys) -> BatchAddress:
    return BatchAddress(address, keys.of(Purpose.BATCH), _file_bytes(fleet))


def asks_for_keys(fleet: FleetSpec) -> bool:
    return bool(fleet.gateway.keys_file or fleet.gateway.api_keys)


def _hosts(fleet: FleetSpec) -> tuple[str, ...]:
    """Return the host names that a gateway accepts, with those that local commands use; empty for any."""
    given, host = fleet.gateway.hosts, fleet.gateway.host
    if given:
        return tuple(dict.fromkeys((*given, *LOOPBACK, host)))
    return () if asks_for_keys(fleet) or host not in LOOPBACK else LOOPBACK


def owners(fleet: FleetSpec, named: Sequence[str]) -> tuple[str, ...]:
    """Return `named` with each plain-text key replaced by its owner, so that only gateways know the keys."""
    given = fleet.gateway
    any_key = () if asks_for_keys(fleet) else named  # then any key is accepted, and is its own owner
    in_clear = {*given.api_keys, *given.admin_keys, *any_key} - {EVERYBODY}
    return tuple(namespace(name) if name in in_clear else name for name in named)


def _models(fleet: FleetSpec) -> tuple[ServedModel, ...]:
    return (ServedModel(fleet.model.name, fleet.model.aliases, fleet.model.embeddings),)


def _file_bytes(fleet: FleetSpec) -> int:
    return int(fleet.batch.max_file_mib * MIB)


def batch_config(
    fleet: FleetSpec, home: FleetHome, directory: str, keys: FleetKeys, host: str, port: int
) -> BatchConfig:
    batch, limits = fleet.batch, fleet.gateway.limits
    return BatchConfig(
        store_url=batch.database or f"sqlite:///{home.batch / 'batch.sqlite'}",
        files_url=batch.files or str(home.batch / "files"),
        models=_models(fleet),
        directory=directory,
        secret=keys.of(Purpose.DIRECTORY),
        key=keys.of(Purpose.BATCH),
        engine_key=keys.of(Purpose.ENGINES),
        host=host,
        port=port,
        limits=BatchLimits(
            file_bytes=_file_bytes(fleet),
            requests_per_batch=batch.max_requests,
            prompt_bytes_per_token=limits.prompt_bytes_per_token,
            structured_outputs=fleet.gateway.key_limits.structured_outputs or StructuredOutputs.ALLOW,
            unknown_fields=fleet.gateway.unknown_fields,
        ),
        dispatch=configured(
            DispatchSettings,
            batch,
            max_in_flight=batch.in_flight_per_engine,
            coserving=fleet.coserving.enabled,
            keep_free_fraction=batch.keep_free,
        ),
        # Connections of all gateways come together here, so the limit of one gateway does not apply.
        server=replace(limits.server, max_connections=ServerLimits().max_connections),
        upstream=limits.upstream,
        file_ttl_s=int(batch.file_ttl) if batch.file_ttl else None,
        shared_prefixes=owners(fleet, fleet.gateway.shared_prefixes),
    )
