"""Co-serving settings survive vLLM's command line, and wrong ones are told."""

import json
from pathlib import Path

import pytest

from placement.iteration.interface import ServingSettings, TurnTargets
from placement.iteration.latency import CONSERVATIVE, LatencyModel, RegionError
from workers.coserving.config import CoServingConfig, CoServingConfigError, starting_model
from workers.profiles import Profile, ProfileKey, ProfileStore

SET = CoServingConfig(
    ServingSettings("bros", TurnTargets(0.5, 0.05), margin=0.2), LatencyModel(1e-4, 1e-8, 0, 1e-3), True, 4
)


def test_settings_survive_the_command_line() -> None:
    assert CoServingConfig.from_additional_config(json.loads(json.dumps(SET.to_additional_config()))) == SET


def test_an_engine_without_settings_gets_the_defaults() -> None:
    assert CoServingConfig.from_additional_config({}) == CoServingConfig()
    assert not CoServingConfig().profiled


@pytest.mark.parametrize("wrong", [{"polcy": 1}, {"serving": {"ttft": 1}}, {"safepoint_every": 0}])
def test_wrong_settings_are_told(wrong: dict[str, object]) -> None:
    with pytest.raises(CoServingConfigError):
        CoServingConfig.from_additional_config({"coserving": wrong})


def test_a_measured_model_is_used_and_its_absence_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = ProfileKey("small", "CPU x2", "0.32.0")
    measured = LatencyModel(1e-4, 1e-8, 1e-7, 1e-3)
    config = CoServingConfig(profiles=str(tmp_path / "profiles.json"))
    assert starting_model(config, key) == CONSERVATIVE
    assert "run `conserve profile`" in caplog.text
    profile = Profile(measured, (RegionError("all", 9, 0.01, 0.02, 0.03),), 0.001, 0.0)
    ProfileStore(tmp_path / "profiles.json").save(key, profile)
    assert starting_model(config, key) == measured
    assert starting_model(config, ProfileKey("small", "CPU x4", "0.32.0")) == CONSERVATIVE
