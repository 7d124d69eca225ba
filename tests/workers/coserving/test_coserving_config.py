"""Co-serving settings survive vLLM's command line, and invalid ones are reported."""

import json
from dataclasses import asdict, replace

import pytest

from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import CONSERVATIVE, LatencyModel
from workers.engine.coserving.config import CoServingConfig, CoServingConfigError, with_knowledge
from workers.engine.coserving.starting_model import starting_model
from workers.profiles import ProfileKey, StartingKnowledge

MEASURED = LatencyModel(1e-4, 1e-8, 1e-7, 1e-3)
SET = CoServingConfig(
    ServingSettings("bros", TurnTargets(0.5, 0.05), margin=0.2),
    LatencyModel(1e-4, 1e-8, 0, 1e-3),
    profiled=True,
    safepoint_every=4,
)
KEY = ProfileKey("small", "float32", "CPU x2", 1, 1, None, "eager", "0.32.0")


def test_coserving_settings_are_unchanged_after_they_pass_through_the_command_line() -> None:
    assert CoServingConfig.from_additional_config(json.loads(json.dumps(SET.to_additional_config()))) == SET


def test_an_engine_without_settings_gets_the_defaults() -> None:
    assert CoServingConfig.from_additional_config({}) == CoServingConfig()
    assert not CoServingConfig().profiled


@pytest.mark.parametrize("wrong", [{"polcy": 1}, {"serving": {"ttft": 1}}, {"safepoint_every": 0}])
def test_wrong_coserving_settings_are_reported(wrong: dict[str, object]) -> None:
    with pytest.raises(CoServingConfigError):
        CoServingConfig.from_additional_config({"coserving": wrong})


def test_a_starting_engine_gets_measured_latency_models_and_its_power_cap_in_its_settings() -> None:
    known = StartingKnowledge({str(KEY): asdict(MEASURED)}, 400.0)
    told = json.loads(with_knowledge(json.dumps(SET.to_additional_config()), known))
    wanted = replace(SET, profiles=known.profiles, power_cap_w=400.0)
    assert CoServingConfig.from_additional_config(told) == wanted


def test_an_engine_starts_with_its_measured_latency_model_or_reports_that_it_guesses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guess = LatencyModel(1e-5, 1e-9, 1e-8, 1e-2)
    assert starting_model(CoServingConfig(), KEY, None) == CONSERVATIVE
    assert starting_model(CoServingConfig(), KEY, guess) == guess
    assert "run `conserve profile`" in caplog.text
    knows = CoServingConfig(profiles={str(KEY): asdict(MEASURED)})
    assert starting_model(knows, KEY, guess) == MEASURED
    assert starting_model(knows, replace(KEY, hardware="CPU x4"), guess) == guess
