"""Each component's configuration holds the values of the fleet file."""

import json
from pathlib import Path

import pytest

from deploy.fleet import FleetFileError, FleetSpec, load_fleet, parse_fleet
from deploy.fleet.components import (
    EngineName,
    alike,
    directory_settings,
    engine_spec,
    engines,
    gateway_config,
    keeper_settings,
    placer_settings,
    power_settings,
    shared_tier,
)
from deploy.fleet.engine_arguments import engine_resources
from deploy.generated import SCHEMA_FILE
from deploy.home import FleetHome, FleetKeys
from placement.engines import Role
from placement.routing.placer_settings import PlacingPolicy
from router.gateway.config import Handover, dump, load
from workers.engine.coserving.config import PROMPT_SCHEDULER, SCHEDULER_CLASS

CONFIGS = SCHEMA_FILE.parent
HOME = FleetHome(Path("/state"))
KEYS = FleetKeys("a token of a cluster", "f")


def fleet(name: str) -> FleetSpec:
    return load_fleet(CONFIGS / f"{name}.yaml")


def spec_of(wanted: FleetSpec, name: str) -> dict[str, object]:
    engine = next(engine for engine in engines(wanted) if engine.name == name)
    spec = engine_spec(wanted, engine, HOME, "10.1.2.3")
    return {field: getattr(spec, field) for field in type(spec).__dataclass_fields__}


def test_only_decoders_use_lmcache_and_not_together_with_co_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.fleet.checks.find_spec", lambda name: name)
    text = (CONFIGS / "laptop.yaml").read_text() + "  kv_tiers: [host, lmcache]\n"
    wanted = parse_fleet(text, "fleet.yaml")
    tiers = {engine.name: shared_tier(wanted, engine, HOME) is not None for engine in engines(wanted)}
    assert tiers == {"prefill-0": False, "decode-0": True, "decode-1": True}
    assert placer_settings(wanted).shared_tier and not placer_settings(fleet("laptop")).shared_tier
    with pytest.raises(FleetFileError, match="use one or the other"):
        parse_fleet(text + "coserving:\n  enabled: true\n", "fleet.yaml")
    monkeypatch.setattr("deploy.fleet.checks.find_spec", lambda name: None)
    with pytest.raises(FleetFileError, match=r"requirements/lmcache\.txt"):
        parse_fleet(text, "fleet.yaml")


def test_a_fleet_has_an_engine_for_every_replica_of_every_tier() -> None:
    assert [engine.name for engine in engines(fleet("laptop"))] == ["prefill-0", "decode-0", "decode-1"]
    assert len(list(engines(fleet("two-nodes")))) == 8


def test_vllm_options_of_a_tier_are_added_to_those_of_all_engines() -> None:
    options = dict(spec_of(fleet("a40-paper"), "decode-2")["options"])  # type: ignore[call-overload]
    assert options["max-num-seqs"] == 128
    assert options["gpu-memory-utilization"] == 0.9
    assert "max-num-seqs" not in dict(spec_of(fleet("a40-paper"), "prefill-0")["options"])  # type: ignore[call-overload]


def test_each_engine_of_a_fleet_has_a_fingerprint_of_its_own_that_stays_the_same() -> None:
    laptop = fleet("laptop")
    prints = [engine_spec(laptop, engine, HOME, "h").fingerprint() for engine in engines(laptop)]
    assert len(set(prints)) == 3
    assert prints == [engine_spec(laptop, engine, HOME, "h").fingerprint() for engine in engines(laptop)]


def test_only_the_decoders_of_a_coserving_fleet_coserve() -> None:
    prefill, decode = spec_of(fleet("two-nodes"), "prefill-0"), spec_of(fleet("two-nodes"), "decode-0")
    assert prefill["scheduler_class"] == PROMPT_SCHEDULER
    assert decode["scheduler_class"] == SCHEDULER_CLASS
    assert "coserving" in json.loads(str(decode["additional"]))


def test_prefillers_coserve_if_the_fleet_file_gives_them_offline_work() -> None:
    text = (CONFIGS / "two-nodes.yaml").read_text()
    wanted = parse_fleet(text.replace("\ncoserving:", "\nbatch: {harvest_prefill: true}\ncoserving:"), "f")
    prefill = engine_spec(wanted, next(e for e in engines(wanted) if e.tier.role is Role.PREFILL), HOME, "h")
    assert prefill.scheduler_class == SCHEDULER_CLASS
    assert prefill.connector is not None and prefill.connector.plugins


def test_engines_for_embeddings_have_vllms_own_scheduler() -> None:
    text = "name: e\nmodel: {path: m, embeddings: true}\npolicy: collocated\n"
    text += "tiers: [{name: t, role: mixed}]\n"
    wanted = parse_fleet(text, "f")
    assert engine_spec(wanted, next(engines(wanted)), HOME, "h").scheduler_class is None


def gpus_of(wanted: FleetSpec) -> tuple[str, ...]:
    return power_settings(wanted, next(engines(wanted)), HOME, ("3",)).gpus


def test_power_settings_of_an_engine_name_only_the_gpus_that_it_asked_for() -> None:
    text = (CONFIGS / "co-serving.yaml").read_text()
    with_gpu = text.replace("{decode_tier: 1}", "{decode_tier: 1, GPU: 1}\n    power_cap_w: 200")
    assert gpus_of(parse_fleet(text, "f")) == ()
    assert gpus_of(parse_fleet(with_gpu, "f")) == ("3",)
    assert gpus_of(fleet("a40-paper")) == ("3",)
    with pytest.raises(FleetFileError, match=r"a power cap needs GPUs, but engine\.device is 'cpu'"):
        parse_fleet(with_gpu.replace(", GPU: 1", ""), "f")


def test_a_gateways_configuration_file_is_read_back_unchanged(tmp_path: Path) -> None:
    for name in ("laptop", "a40-paper", "two-nodes"):
        config = gateway_config(fleet(name), "gateway-0", "10.0.0.1:99", KEYS, "10.0.0.1:77")
        file = tmp_path / f"{name}.json"
        file.write_bytes(dump(config))
        assert load(file) == config


def test_a_gateway_starts_both_legs_together_over_tcp_and_one_after_the_other_over_nixl() -> None:
    laptop = gateway_config(fleet("laptop"), "g", "d:1", KEYS, "d:2")
    nodes = gateway_config(fleet("two-nodes"), "g", "d:1", KEYS, "d:2")
    assert (laptop.handover, nodes.handover) == (Handover.TOGETHER, Handover.IN_TURN)
    assert laptop.reuse_port and nodes.reuse_port


def test_limits_in_the_fleet_file_reach_the_gateways_http_server_and_its_turns() -> None:
    text = (
        "policy: collocated\ntiers: [{name: all, role: mixed, replicas: 1}]\n"
        "gateway: {limits: {first_token_timeout: 7s, idle_timeout: 5s, request_timeout: 3s}}\n"
    )
    config = gateway_config(parse_fleet(text, "f.yaml"), "g", "d:1", KEYS, "d:2")
    assert (config.limits.upstream.first_byte_timeout_s, config.limits.upstream.chunk_timeout_s) == (7, 5)
    assert (config.limits.server.write_stall_s, config.limits.server.head_timeout_s) == (5, 3)


def test_policies_and_times_of_the_fleet_file_reach_the_placer_and_the_engines() -> None:
    baseline = parse_fleet(
        "policy: collocated\n"
        "tiers: [{name: all, role: mixed, replicas: 2}]\n"
        "conversation: {ttl: 5m, headroom_tokens: 7, redisaggregate_tokens: 11}\n",
        "f.yaml",
    )
    settings = placer_settings(baseline)
    assert settings.policy is PlacingPolicy.COLLOCATED
    assert (settings.headroom_tokens, settings.redisaggregation.above_tokens) == (7, 11)
    assert directory_settings(baseline).ttl_s == 300
    connector = engine_spec(baseline, EngineName("all-0", baseline.tiers[0]), HOME, "h").connector
    assert connector is not None and not connector.transfer


@pytest.mark.parametrize(("name", "together"), [("laptop", 2), ("a40-paper", None)])
def test_engines_that_share_cores_start_a_few_at_a_time(name: str, together: int | None) -> None:
    assert keeper_settings(fleet(name)).start_together == together


def test_gateways_and_engines_get_the_trace_endpoint_and_only_gateways_sample() -> None:
    plain = fleet("laptop")
    block = "\nobserve: {tracing: {endpoint: 'http://collector:4318/', sample: 0.2}}\n"
    traced = parse_fleet((CONFIGS / "laptop.yaml").read_text() + block, "traced")
    assert gateway_config(plain, "gateway-0", "127.0.0.1:1", KEYS, "d:2").tracing is None
    config = gateway_config(traced, "gateway-0", "127.0.0.1:1", KEYS, "d:2")
    assert config.tracing is not None and config.tracing.sample == 0.2
    off, on = spec_of(plain, "decode-0"), spec_of(traced, "decode-0")
    assert "otlp-traces-endpoint" not in dict(off["options"])  # type: ignore[call-overload]
    assert dict(on["options"])["otlp-traces-endpoint"] == "http://collector:4318/v1/traces"  # type: ignore[call-overload]
    assert dict(on["env"])["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"  # type: ignore[call-overload]


def test_an_engine_asks_for_one_gpu_per_rank() -> None:
    nodes, cpu = fleet("two-nodes"), fleet("laptop")
    assert [engine_resources(nodes, tier)["GPU"] for tier in nodes.tiers] == [2, 2]
    assert "GPU" not in engine_resources(cpu, cpu.tiers[0])
    text = "policy: collocated\ntiers: [{name: all, role: mixed, resources: {GPU: 0.5}}]\n"
    shared = parse_fleet(text + "engine: {args: {gpu-memory-utilization: 0.4}}\n", "f")
    assert engine_resources(shared, shared.tiers[0]) == {"GPU": 0.5}
    staged = parse_fleet(
        "policy: collocated\ntiers: [{name: all, role: mixed}]\n"
        "engine: {args: {tensor-parallel-size: 4, pipeline-parallel-size: 2}}\n",
        "f",
    )
    assert engine_resources(staged, staged.tiers[0]) == {"GPU": 8}


TWO_TIERS = """
model: {path: m, max_context: 4096}
engine: {device: %s}
tiers:
  - {name: prefill, role: prefill, %s}
  - {name: decode, role: decode, %s}
"""


@pytest.mark.parametrize(
    ("device", "prefill", "decode", "same"),
    [
        ("cpu", "", "", True),
        ("cpu", "", "args: {max-num-seqs: 4}", False),
        ("cuda", "hardware: {accelerator: H100}", "hardware: {accelerator: H100}", True),
        ("cuda", "hardware: {accelerator: H100}", "hardware: {accelerator: H100}, power_cap_w: 400", False),
        ("cuda", "hardware: {accelerator: H100}", "hardware: {accelerator: L40S}", False),
        ("cuda", "", "", False),  # nobody said what they are
    ],
)
def test_tiers_share_measured_speeds_only_if_hardware_and_arguments_are_the_same(
    device: str, prefill: str, decode: str, same: bool
) -> None:
    named = alike(parse_fleet(TWO_TIERS % (device, prefill, decode), "fleet.yaml"))
    assert (named.get("prefill", "p") == named.get("decode", "d")) is same
