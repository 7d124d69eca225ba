"""Every key of the fleet file reaches a component, and every configuration field has a key or is internal."""

import ast
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from deploy.fleet import FleetSpec
from deploy.fleet.checks import check
from deploy.fleet.components import (
    alike,
    batch_config,
    directory_settings,
    engine_spec,
    engines,
    gateway_config,
    keeper_settings,
    placer_settings,
    power_settings,
    scale_limits,
    shared_tier,
)
from deploy.fleet.engine_arguments import engine_resources
from deploy.home import FleetHome, FleetKeys
from deploy.ray.cluster import OwnCluster
from deploy.ray.common import control_resources, resources
from kvtransfer.config import ConnectorConfig
from placement.routing.placer_settings import PlacerSettings, Redisaggregation
from placement.scheduling.interface import ServingSettings
from placement.scheduling.interface import TurnTargets as ServingSlo
from placement.sizing.autoscaling import ScaleLimits
from placement.sizing.capacity import Thresholds
from router.auth.keys import DefaultLimits, inline_keys
from router.batch.config import BatchConfig, BatchLimits, DispatchSettings
from router.directory.directory import DirectorySettings
from router.gateway.config import (
    AnswersConfig,
    GatewayConfig,
    GatewayLimits,
    ServedModel,
    SloSettings,
    TlsConfig,
    TracingConfig,
)
from router.http import ServerLimits, UpstreamLimits
from router.identity.conversation_ids import namespace
from tests.support.fleet import ROOT
from workers.engine.coserving.config import PROMPT_SCHEDULER, CoServingConfig
from workers.engine.overload.config import OVERLOAD_PLUGIN
from workers.keeper.config import KeeperSettings
from workers.keeper.launch import EngineKeys, LaunchSpec, Start, engine_command
from workers.power.engine_power import PowerSettings

HOME = FleetHome(Path("/state/fleets/base"))
CONFIGURATIONS = {
    *(
        GatewayConfig,
        AnswersConfig,
        GatewayLimits,
        DefaultLimits,
        ServedModel,
        SloSettings,
        TlsConfig,
        TracingConfig,
    ),
    *(ServerLimits, UpstreamLimits),
    *(BatchConfig, BatchLimits, DispatchSettings),
    *(DirectorySettings, Thresholds),
    *(PlacerSettings, Redisaggregation, ScaleLimits),
    *(LaunchSpec, KeeperSettings, PowerSettings, ConnectorConfig),
    *(CoServingConfig, ServingSettings, ServingSlo),
}

BASE: dict[str, Any] = {
    "name": "base",
    "tiers": [
        {"name": "prefill", "role": "prefill"},
        {"name": "decode", "role": "decode", "replicas": 2, "autoscale": {"min": 1, "max": 8}},
    ],
    "coserving": {"enabled": True},
    "observe": {"tracing": {"endpoint": "http://collector:4318"}},
}


class Everything:
    """Holds all configurations that components receive from one fleet file."""

    def __init__(self, content: dict[str, Any]) -> None:
        fleet = self.fleet = FleetSpec.of(content)
        assert list(check(fleet)) == []
        self.names = [engine.name for engine in engines(fleet)]
        decode = list(engines(fleet))[-1]
        home = FleetHome.of(fleet.name, "/state")
        self.engine = engine_spec(fleet, decode, home, "10.0.0.1")
        start = Start(epoch=1, http_port=2, transfer_port=3)
        command = engine_command(self.engine, start, EngineKeys(), {"PATH": "/bin"})
        self.argv, self.env = " ".join(command.argv), command.env
        self.keeper = keeper_settings(fleet)
        self.power = power_settings(fleet, decode, home, ("0",))
        self.shared_tier = shared_tier(fleet, decode, home)
        self.placer, self.alike = placer_settings(fleet), alike(fleet)
        self.directory = directory_settings(fleet)
        keys = FleetKeys("a token of a cluster", "base")
        self.gateway = gateway_config(fleet, "gateway-0", "10.0.0.1:9", keys, "10.0.0.1:8")
        self.server = self.gateway.limits.server
        self.batch = batch_config(fleet, home, "10.0.0.1:9", keys, "10.0.0.1", 8)
        limits = decode.tier.autoscale
        self.scale = scale_limits(fleet, limits) if limits else None
        self.coserving = CoServingConfig.from_additional_config(json.loads(self.engine.additional or "{}"))
        self.resources = resources(engine_resources(fleet, decode.tier))
        self.control = control_resources(fleet)
        self.head = " ".join(OwnCluster(fleet, home, 1, 2).head_argv())

    def settings(self) -> Iterator[tuple[tuple[type, str], Any]]:
        for value in vars(self).values():
            yield from settings(value)


def settings(value: Any) -> Iterator[tuple[tuple[type, str], Any]]:
    """Yield the class, name and value of every field in a configuration and in nested configurations."""
    if type(value) in CONFIGURATIONS:
        for field in fields(value):
            inner = getattr(value, field.name)
            yield (type(value), field.name), inner
            yield from settings(inner)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from settings(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from settings(one)


@dataclass(frozen=True)
class Case:
    value: Any
    arrives: Callable[[Everything], Any]
    expected: Any = None  # what arrives, if not the value
    base: tuple[tuple[str, Any], ...] = ()  # other keys that give this key an effect


def case(value: Any, arrives: Callable[[Everything], Any], expected: Any = None, **base: Any) -> Case:
    return Case(value, arrives, expected, tuple((key.replace("__", "."), one) for key, one in base.items()))


def server_limits(got: Everything) -> tuple[ServerLimits, ServerLimits]:
    return got.gateway.limits.server, got.batch.server


def key_limits(got: Everything) -> DefaultLimits:
    return got.gateway.key_limits


LMCACHE = {"kv__kv_tiers": ["host", "lmcache"], "coserving__enabled": False}
DISK = {"kv__disk_gib": 1, "kv__disk_path": "/disk"}
TLS = {"gateway__tls__cert": "/c", "gateway__tls__key": "/k"}
COLLOCATED = {"coserving__enabled": False, "policy": "collocated"}
CASES = {
    "name": case("other", lambda got: got.gateway.fleet),
    "policy": case("collocated", lambda got: got.placer.policy),
    "model.path": case("Qwen/Qwen3-8B", lambda got: got.engine.model),
    "model.served_name": case("qwen", lambda got: got.gateway.models[0].name),
    "model.aliases": case(
        ["gpt"], lambda got: (got.gateway.models[0].aliases, "small gpt" in got.argv), (("gpt",), True)
    ),
    "model.embeddings": case(
        True,
        lambda got: (got.batch.models[0].embeddings, "--runner pooling" in got.argv),
        (True, True),
        **COLLOCATED,
    ),
    "model.dtype": case("float16", lambda got: got.engine.dtype),
    "model.max_context": case(4096, lambda got: got.engine.max_context),
    "engine.device": case("cpu", lambda got: got.engine.device),
    "engine.args": case({"max-num-seqs": 7}, lambda got: "--max-num-seqs 7" in got.argv, True),
    "engine.env": case({"A_NAME": "b"}, lambda got: got.env.get("A_NAME"), "b"),
    "engine.threads": case(3, lambda got: got.env.get("OMP_NUM_THREADS"), "3", engine__device="cpu"),
    "engine.exact_tokens": case(False, lambda got: "workers.engine.exact_tokens" in got.argv),
    "engine.start_together": case(5, lambda got: got.keeper.start_together),
    "engine.start_limit": case(11, lambda got: got.keeper.start_limit_s),
    "engine.stall_limit": case(12, lambda got: got.keeper.stall_limit_s),
    "engine.grammar_cpu": case(16, lambda got: got.engine.grammar_cpu_s),
    "engine.grammar_memory_mib": case(170, lambda got: got.engine.grammar_memory_mib),
    "engine.memory_gib": case(15, lambda got: got.keeper.memory_gib),
    "engine.lease": case(
        15, lambda got: (got.keeper.lease_s, got.directory.settle_s, got.power.grace_s), (15, 15, 45)
    ),
    "tiers.name": case("decoders", lambda got: got.names[-1], "decoders-1"),
    "tiers.role": case("mixed", lambda got: got.engine.role, **COLLOCATED),
    "tiers.replicas": case(3, lambda got: len(got.names), 4),
    "tiers.autoscale.min": case(2, lambda got: got.scale and got.scale.least),
    "tiers.autoscale.max": case(9, lambda got: got.scale and got.scale.most),
    "tiers.resources": case({"GPU": 1, "rack": 1}, lambda got: got.resources["resources"], {"rack": 1}),
    "tiers.hardware.accelerator": case("H100", lambda got: sorted(got.alike), ["decode"]),
    "tiers.power_cap_w": case(200, lambda got: got.power.cap_w),
    "tiers.args": case({"max-num-seqs": 8}, lambda got: "--max-num-seqs 8" in got.argv, True),
    "tiers.env": case({"A_NAME": "c"}, lambda got: got.env.get("A_NAME"), "c"),
    "gateway.host": case("0.0.0.0", lambda got: got.gateway.host, gateway__keys_file="/keys.yaml"),
    "gateway.hosts": case(["llm.example"], lambda got: got.gateway.hosts[:1], ("llm.example",)),
    "gateway.tls.cert": case("/c.pem", lambda got: got.gateway.tls.cert, **TLS),
    "gateway.tls.key": case("/k.pem", lambda got: got.gateway.tls.key, **TLS),
    "gateway.trusted_proxies": case(["10.0.0.0/8"], lambda got: got.gateway.trusted_proxies, ("10.0.0.0/8",)),
    "gateway.port": case(8001, lambda got: got.gateway.port),
    "gateway.keys_file": case("/keys.yaml", lambda got: got.gateway.keys_file),
    "gateway.api_keys": case(["k"], lambda got: got.gateway.keys, inline_keys(["k"], [])),
    "gateway.shared_prefixes": case(
        ["k", "*"],
        lambda got: [one.shared_prefixes for one in (got.gateway, got.batch)],
        [(namespace("k"), "*")] * 2,
    ),
    "gateway.admin_keys": case(["a"], lambda got: got.gateway.keys, inline_keys([], ["a"])),
    "gateway.key_limits.requests_per_minute": case(60, lambda got: key_limits(got).requests_per_minute),
    "gateway.key_limits.tokens_per_minute": case(61, lambda got: key_limits(got).tokens_per_minute),
    "gateway.key_limits.turns": case(62, lambda got: key_limits(got).turns),
    "gateway.key_limits.waiting_share": case(0.25, lambda got: key_limits(got).waiting_share),
    "gateway.key_limits.stored_gib": case(63, lambda got: key_limits(got).stored_gib),
    "gateway.key_limits.batches": case(64, lambda got: key_limits(got).batches),
    "gateway.key_limits.grammars_per_minute": case(65, lambda got: key_limits(got).grammars_per_minute),
    "gateway.key_limits.structured_outputs": case(
        "refuse",
        lambda got: (key_limits(got).structured_outputs, got.batch.limits.structured_outputs),
        ("refuse", "refuse"),
    ),
    "gateway.unknown_fields": case(
        "refuse", lambda got: {got.gateway.unknown_fields, got.batch.limits.unknown_fields}, {"refuse"}
    ),
    "gateway.answers.path": case("/answers.sqlite", lambda got: got.gateway.answers.path),
    "gateway.answers.keep": case(65, lambda got: got.gateway.answers.keep_s),
    "gateway.answers.gib": case(2, lambda got: got.gateway.answers.max_bytes, 2 << 30),
    "gateway.limits.body_mib": case(
        1.5, lambda got: [one.max_body_bytes for one in server_limits(got)], [3 << 19, 3 << 19]
    ),
    "gateway.limits.headers": case(10, lambda got: [one.max_headers for one in server_limits(got)], [10, 10]),
    "gateway.limits.header_kib": case(
        2, lambda got: [one.max_head_bytes for one in server_limits(got)], [2048, 2048]
    ),
    "gateway.limits.connections": case(99, lambda got: got.gateway.limits.server.max_connections),
    "gateway.limits.answers": case(16, lambda got: got.gateway.limits.answers),
    "gateway.limits.prompt_bytes_per_token": case(8, lambda got: got.gateway.limits.prompt_bytes_per_token),
    "gateway.limits.owner_share": case(0.25, lambda got: got.gateway.limits.owner_share),
    "gateway.limits.bodies_mib": case(98, lambda got: got.gateway.limits.bodies_mib),
    "gateway.limits.request_timeout": case(
        3, lambda got: [(one.head_timeout_s, one.body_timeout_s) for one in server_limits(got)], [(3, 3)] * 2
    ),
    "gateway.limits.first_token_timeout": case(
        4, lambda got: [one.upstream.first_byte_timeout_s for one in (got.gateway.limits, got.batch)], [4, 4]
    ),
    "gateway.limits.idle_timeout": case(
        5,
        lambda got: (
            [one.upstream.chunk_timeout_s for one in (got.gateway.limits, got.batch)],
            [one.write_stall_s for one in server_limits(got)],
        ),
        ([5, 5], [5, 5]),
    ),
    "conversation.ttl": case("5m", lambda got: (got.directory.ttl_s, got.engine.connector.ttl_s), (300, 360)),
    "conversation.longest_ttl": case("2h", lambda got: got.gateway.longest_ttl_s, 7200),
    "conversation.park_after": case(7, lambda got: got.engine.connector.park_after_s),
    "conversation.redisaggregate_tokens": case(
        11, lambda got: [one.redisaggregation.above_tokens for one in (got.gateway, got.placer)], [11, 11]
    ),
    "conversation.redisaggregate_share": case(
        0.2, lambda got: [one.redisaggregation.min_share for one in (got.gateway, got.placer)], [0.2, 0.2]
    ),
    "conversation.headroom_tokens": case(12, lambda got: got.placer.headroom_tokens),
    "conversation.decoder_wait": case(13, lambda got: got.gateway.place_wait_s),
    "conversation.prefiller_wait": case(14, lambda got: got.placer.max_prefill_wait_s),
    "placement.first_turns": case("prefiller", lambda got: got.placer.first_turns),
    "placement.relieve_hot": case(True, lambda got: got.placer.relieve_hot),
    "placement.roles": case("elastic", lambda got: got.placer.roles),
    "slos.ttfet": case(1.5, lambda got: got.gateway.slos["default"].ttfet_s),
    "slos.last_turn_tbt": case("50ms", lambda got: got.gateway.slos["default"].last_turn_tbt_s, 0.05),
    "slos.ahead": case("12s", lambda got: got.gateway.slos["default"].queue_weight, 12.0),
    "slos.keys": case(["k"], lambda got: got.gateway.slos["default"].owners, (namespace("k"),)),
    "slos.e2e": case(60, lambda got: got.gateway.slos["default"].e2e_s),
    "transfer.backend": case(
        "nixl", lambda got: (got.engine.connector.backend, got.gateway.handover), ("nixl", "in_turn")
    ),
    "transfer.encrypt": case(True, lambda got: got.engine.connector.encrypt),
    "transfer.lease": case(16, lambda got: got.engine.connector.lease_s),
    "transfer.staging_gib": case(1.5, lambda got: got.engine.connector.staging_gib),
    "transfer.timeout": case(17, lambda got: got.engine.connector.timeout_s),
    "kv.disk_gib": case(3, lambda got: got.engine.connector.disk_gib, **DISK),
    "kv.disk_path": case("/nvme", lambda got: got.engine.connector.disk_path, **DISK),
    "kv.host_kv_gib": case(2, lambda got: got.engine.connector.host_kv_gib),
    "kv.kv_tiers": case(
        ["lmcache"],
        lambda got: (got.placer.shared_tier, got.engine.connector.host_kv_gib),
        (True, 0),
        coserving__enabled=False,
    ),
    "kv.lmcache.gib": case(3, lambda got: got.shared_tier and got.shared_tier.gib, **LMCACHE),
    "kv.lmcache.timeout": case(2, lambda got: got.engine.connector.lmcache_timeout_s, **LMCACHE),
    "coserving.enabled": case(False, lambda got: got.engine.scheduler_class == PROMPT_SCHEDULER, True),
    "coserving.policy": case("bros", lambda got: got.coserving.serving.policy),
    "coserving.ttft": case(
        1.5, lambda got: (got.coserving.serving.slo.ttft_s, got.gateway.ttft_s), (1.5, 1.5)
    ),
    "coserving.tbt": case(0.5, lambda got: (got.coserving.serving.slo.tbt_s, got.gateway.tbt_s), (0.5, 0.5)),
    "coserving.margin": case(0.25, lambda got: got.coserving.serving.margin),
    "coserving.safepoints": case(False, lambda got: got.coserving.serving.safepoints),
    "coserving.safepoint_layers": case(4, lambda got: got.coserving.safepoint_every),
    "coserving.offline_share": case(0.25, lambda got: got.coserving.serving.offline_share),
    "coserving.ageing": case("30s", lambda got: got.coserving.serving.ageing_s, 30),
    "batch.enabled": case(False, lambda got: got.gateway.batch is None, True),
    "batch.max_requests": case(9, lambda got: got.batch.limits.requests_per_batch),
    "batch.max_file_mib": case(
        0.5,
        lambda got: (got.batch.limits.file_bytes, got.gateway.batch.max_file_bytes),
        (1 << 19, 1 << 19),
    ),
    "batch.in_flight_per_engine": case(9, lambda got: got.batch.dispatch.max_in_flight),
    "batch.harvest_prefill": case(True, lambda got: got.batch.dispatch.harvest_prefill),
    "batch.keep_free": case(0.25, lambda got: got.batch.dispatch.keep_free_fraction),
    "batch.ageing": case("1m", lambda got: got.batch.dispatch.ageing_s, 60),
    "batch.file_ttl": case("1h", lambda got: got.batch.file_ttl_s, 3600),
    "batch.database": case("sqlite:///x", lambda got: got.batch.store_url),
    "batch.files": case("/files", lambda got: got.batch.files_url),
    "capacity.window": case(30, lambda got: got.placer.capacity_window_s),
    "capacity.high": case(
        0.9, lambda got: (got.directory.thresholds.high, got.scale.thresholds.high), (0.9, 0.9)
    ),
    "capacity.target": case(
        0.6, lambda got: (got.directory.thresholds.target, got.scale.thresholds.target), (0.6, 0.6)
    ),
    "capacity.low": case(
        0.2, lambda got: (got.directory.thresholds.low, got.scale.thresholds.low), (0.2, 0.2)
    ),
    "capacity.cool_down": case(18, lambda got: got.scale.cool_down_s),
    "capacity.calm": case(19, lambda got: got.scale.calm_s),
    "overload.policy": case(
        "drop",
        lambda got: (OVERLOAD_PLUGIN in got.engine.connector.plugins, got.directory.dropping is not None),
        (True, True),
        engine__device="cpu",
        engine__args={"enforce-eager": True},
        coserving__enabled=False,
    ),
    "observe.tracing.endpoint": case(
        "http://other:1",
        lambda got: (got.gateway.tracing.endpoint, "http://other:1/v1/traces" in got.argv),
        ("http://other:1", True),
    ),
    "observe.tracing.protocol": case(
        "grpc",
        lambda got: (got.gateway.tracing.protocol, got.env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")),
        ("grpc", "grpc"),
    ),
    "observe.tracing.sample": case(0.5, lambda got: got.gateway.tracing.sample),
    "capacity.drain": case("200s", lambda got: got.keeper.drain_s, 200.0),
    "observe.audit": case(True, lambda got: got.gateway.audit),
    "ray.address": case("10.0.0.1:6379", lambda got: "conserve_control" in got.control["resources"], False),
    "ray.control_resources": case({"CPU": 2}, lambda got: got.control["num_cpus"], 2),
    "ray.dashboard": case(True, lambda got: "--include-dashboard true" in got.head),
}

# Other values of a key, which set other fields.
ALSO = {"overload.policy": "preempt"}

# Keys that an actor reads from the fleet itself.
DIRECT = {
    "tiers.hardware.node_gpus": ["deploy/fleet/engine_checks.py"],
    "tiers.hardware.nodes": ["deploy/fleet/engine_checks.py"],
    "gateway.processes": ["deploy/ray/gateway_actor.py"],
    "gateway.open": ["deploy/fleet/checks.py"],
}

# Fields that no key sets, and why.
IDENTITY = "of one engine or process: its name, its place, its addresses, what it shares with the others"
MEASURED = "measured by `conserve profile`, or written for a benchmark"
CONSTANT = "bounds and periods of the implementation, which nobody should have to know"
NOT_SET: dict[type, dict[str, str]] = {
    GatewayConfig: {
        "directory name reuse_port metrics_host directory_secret engine_key": IDENTITY,
        "tokens_per_byte drain_s": CONSTANT,
    },
    BatchConfig: {"directory secret key engine_key host port": IDENTITY, "flex_timeout_s": CONSTANT},
    BatchLimits: {"line_bytes reported_errors": CONSTANT},
    DispatchSettings: {
        "max_tries request_timeout_s blind_window backoff_first_s backoff_max_s cancel_grace_s tick_s "
        "lost_after_s": CONSTANT
    },
    ServerLimits: {
        "max_url_bytes idle_timeout_s write_high_bytes write_low_bytes read_high_bytes linger_s": CONSTANT,
        "handshake_timeout_s body_grace_s body_bytes_per_s": CONSTANT,
    },
    UpstreamLimits: {
        "max_connections acquire_timeout_s connect_timeout_s idle_timeout_s max_head_bytes": CONSTANT
    },
    PlacerSettings: {
        "fill": CONSTANT,
    },
    DirectorySettings: {"return_s gateway_grace_s push_states_s": CONSTANT},
    KeeperSettings: {
        "warm_limit_s tier_limit_s health_interval_s health_timeout_s health_misses end_grace_s "
        "backoff_first_s backoff_longest_s calm_after_s": CONSTANT
    },
    LaunchSpec: {"host": IDENTITY},
    PowerSettings: {"record": IDENTITY, "interval_s": CONSTANT},
    ConnectorConfig: {"engine epoch host port control_socket lmcache safepoint": IDENTITY},
    CoServingConfig: {"model profiled profiles power_cap_w planned iteration_log": MEASURED},
}

# Fields that a fleet sets from other keys than their own. Their default is for a component without a fleet.
DERIVED = {
    (GatewayConfig, "hosts"),  # the fleet sets localhost if clients need no API key
    (GatewayConfig, "slos"),  # the fleet's classes include `default`
    (KeeperSettings, "start_together"),  # by the device
    (KeeperSettings, "kv_gib"),  # by kv.host_kv_gib, kv.kv_tiers and VLLM_CPU_KVCACHE_SPACE
    (ConnectorConfig, "host_kv_gib"),  # by kv.kv_tiers and overload.policy
    (ConnectorConfig, "disk_gib"),  # by kv.kv_tiers and overload.policy
    (ConnectorConfig, "plugins"),  # by coserving.enabled and overload.policy
    (DispatchSettings, "coserving"),  # by coserving.enabled
    (LaunchSpec, "options"),
    (LaunchSpec, "env"),
}


def keys(spec: Any, path: str = "") -> Iterator[str]:
    for field_name, field in spec.__pydantic_fields__.items():
        name, inner = field.alias or field_name, _specs(field.annotation)
        if inner:
            yield from keys(inner[0], f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _specs(kind: Any) -> list[type]:
    if isinstance(kind, type) and hasattr(kind, "__pydantic_fields__"):
        return [kind]
    return [spec for part in get_args(kind) for spec in _specs(part)]


def made(*changes: tuple[str, Any]) -> Everything:
    """Return the configurations of the base file after `changes`, which for tiers apply to the last tier."""
    content = copy.deepcopy(BASE)
    for path, value in changes:
        *way, last = path.replace("slos.", "slos.default.").split(".")
        block: Any = content
        for step in way:
            block = block[-1] if isinstance(block, list) else block
            block = block.setdefault(step, {})
        (block[-1] if isinstance(block, list) else block)[last] = value
    return Everything(content)


def test_every_key_of_the_fleet_file_has_a_test_case() -> None:
    assert sorted([*CASES, *DIRECT]) == sorted(keys(FleetSpec))


@pytest.mark.parametrize("key", CASES)
def test_setting_a_key_of_the_fleet_file_changes_the_configuration_of_its_component(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.fleet.checks.find_spec", lambda name: name)
    one = CASES[key]
    expected = one.value if one.expected is None else one.expected
    assert one.arrives(made(*one.base)) != expected
    assert one.arrives(made(*one.base, (key, one.value))) == expected


@pytest.mark.parametrize("key", DIRECT)
def test_a_key_without_a_configuration_field_is_read_by_the_file_listed_for_it(key: str) -> None:
    read = key.removeprefix("tiers.")
    for file in DIRECT[key]:
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        assert any(isinstance(node, ast.Attribute) and ast.unparse(node).endswith(read) for node in nodes)


@pytest.fixture
def set_by_keys(monkeypatch: pytest.MonkeyPatch) -> set[tuple[type, str]]:
    monkeypatch.setattr("deploy.fleet.checks.find_spec", lambda name: name)
    found = set()
    changes = [(one.base, (key, one.value)) for key, one in CASES.items()]
    for base, change in (*changes, *(((), other) for other in ALSO.items())):
        before, after = made(*base), made(*base, change)
        old = list(before.settings())
        found |= {place for place, value in after.settings() if (place, value) not in old}
    return found


def test_every_configuration_field_has_a_key_or_is_listed_as_internal(
    set_by_keys: set[tuple[type, str]],
) -> None:
    missing = {(kind, field.name) for kind in CONFIGURATIONS for field in fields(kind)} - set_by_keys
    assert missing == {(kind, name) for kind, names in NOT_SET.items() for name in " ".join(names).split()}


def test_a_component_without_keys_receives_its_own_defaults(set_by_keys: set[tuple[type, str]]) -> None:
    """The fleet file repeats no default: without a key, a component uses the default of its own field."""
    defaults = {
        (kind, field.name): field.default
        for kind in CONFIGURATIONS
        for field in fields(kind)
        if field.default not in (MISSING, None) and (kind, field.name) in set_by_keys - DERIVED
    }
    got = made(("name", "fleet"), ("observe", {"tracing": {"endpoint": "http://c:1"}}))
    other = {place: value for place, value in got.settings() if defaults.get(place, value) != value}
    assert other == {}
