"""`conserve simulate` and `conserve plan` print and write their results, and explain their errors."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from deploy.cli.commands.plan import plan
from deploy.cli.commands.simulate import simulate, simulated_fleet, simulation_settings
from deploy.errors import DeployError
from deploy.fleet import load_fleet
from placement import PlacementError
from placement.engines import Role
from placement.scheduling.interface import DEFAULT_TARGETS
from traces import TraceError
from traces.format import TraceConversation, TraceHeader, TraceTurn, write
from traces.simulator.policies import OverloadPolicy, System
from traces.simulator.profiles import find, from_json

REPOSITORY = Path(__file__).parents[2]
FLEET = REPOSITORY / "configs" / "a40-paper.yaml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    turns = (TraceTurn(8_000, 0, 100), TraceTurn(300, 8_100, 100, 1.0))
    path = tmp_path / "trace.jsonl"
    write(path, [TraceConversation(f"c{i}", i * 1.0, turns) for i in range(20)], TraceHeader())
    return path


def test_simulate_compares_systems_on_one_fleet(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    simulate(FLEET, trace, policy="prefiller,full_disaggregation,sticky", json_file=out)
    found = {one["system"]: one["transfers"] for one in json.loads(out.read_text())}
    assert found == {"prefiller": 20, "full_disaggregation": 40, "sticky": 0}


def test_simulate_compares_eviction_policies(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    simulate(FLEET, trace, policy="elastic", overload="off,preempt,park,drop", json_file=out)
    found = json.loads(out.read_text())
    assert [one["system"] for one in found] == [
        f"elastic, {way}" for way in ("off", "preempt", "park", "drop")
    ]
    assert all(one["conversations"] == 20 and one["drops"] == 0 for one in found)


def test_simulate_parks_by_default_after_the_time_in_the_fleet_file() -> None:
    file = load_fleet(FLEET)
    default, park = (simulation_settings(file, None, 0.1, 0, way) for way in (None, OverloadPolicy.PARK))
    assert default == park


def test_simulated_engines_use_the_tbt_target_of_the_file(tmp_path: Path) -> None:
    assert simulation_settings(load_fleet(FLEET), None, 0.1, 0).tbt_s == DEFAULT_TARGETS.tbt_s
    tighter = tmp_path / "fleet.yaml"
    tighter.write_text(FLEET.read_text() + "\ncoserving: {tbt: 38ms}\n")
    assert simulation_settings(load_fleet(tighter), None, 0.1, 0).tbt_s == 0.038


def test_figures_without_any_turn_are_null_in_the_json_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single, out = tmp_path / "single.jsonl", tmp_path / "out.json"
    turns = (TraceTurn(8_000, 0, 100),)
    write(single, [TraceConversation(f"c{i}", i * 1.0, turns) for i in range(20)], TraceHeader())
    simulate(FLEET, single, json_file=out)
    assert json.loads(out.read_text())[0]["later_turn_ttft_p95_s"] is None
    plan(single, rate=0.2, json_file=out)
    made = json.loads(out.read_text())
    assert made["elastic"]["later_ttft_p95_s"] is None and made["elastic"]["first_ttft_p95_s"] > 0
    assert made["prefillers_needed"] is False
    assert "later - s" in capsys.readouterr().out


def test_conserve_plan_from_mean_lengths_gives_the_papers_rate(capsys: pytest.CaptureFixture[str]) -> None:
    plan(rate=1.4)
    assert "R* = 1.667/s" in capsys.readouterr().out


def test_plan_overload_prints_which_engines_could_share_layers_and_what_they_would_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    plan(overload=FLEET, json_file=out)
    said = capsys.readouterr().out
    assert "decode-0 layers 0-13, decode-1 layers 14-27: 303,836 each (+1.3%)" in said
    assert "an engine would have no more KV than now" in said
    assert "a full CUDA graph has all layers in it" in said
    made = json.loads(out.read_text())
    assert made["decode"]["most"]["gained_tokens"] == 2 * 3_836 and "prefill" not in made


def test_plan_overload_reports_engines_that_would_be_too_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "fleet.yaml"
    slow.write_text(FLEET.read_text() + "\ncoserving: {tbt: 10ms}\n")
    plan(overload=slow)
    assert "would be longer than the TBT target" in capsys.readouterr().out
    unknown = tmp_path / "profile.json"
    known = asdict(find("a40-qwen3-0.6b"))
    unknown.write_text(json.dumps({name: value for name, value in known.items() if name != "layers"}))
    with pytest.raises(DeployError, match="has no layers"):
        plan(overload=FLEET, profile=str(unknown))


def test_an_impossible_workload_or_an_unknown_name_is_refused_with_a_sentence(trace: Path) -> None:
    with pytest.raises(PlacementError, match="not one fits"):
        plan(peak_tokens=400_000)
    with pytest.raises(TraceError, match=r"a40-qwen3-0\.6b"):
        plan(trace, profile="nothing")
    with pytest.raises(DeployError, match=r"wrong.*elastic"):
        simulate(FLEET, trace, policy="wrong")
    with pytest.raises(DeployError, match=r"--overload: 'never'.*preempt"):
        simulate(FLEET, trace, overload="never")


def test_a_simulated_fleet_has_the_tiers_and_power_caps_of_its_file() -> None:
    file = load_fleet(FLEET)
    fleet = simulated_fleet(file, find("a40-qwen3-0.6b"))
    assert [(tier.role, tier.replicas) for tier in fleet.tiers] == [(Role.PREFILL, 1), (Role.DECODE, 3)]
    assert fleet.tiers[1].profile.power.limit_w == 200
    chosen = simulation_settings(file, None, 0.1, 0)
    assert chosen.system.system is System.ELASTIC
    assert chosen.placer.redisaggregation.above_tokens == file.conversation.redisaggregate_tokens


def test_a_profile_written_as_json_is_read_back_unchanged() -> None:
    profile = find("laptop")
    assert from_json(json.loads(json.dumps(asdict(profile)))) == profile
