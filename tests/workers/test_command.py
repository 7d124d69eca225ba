"""A launch spec becomes a command line without secrets."""

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from placement.engines import Role
from workers.engine.coserving.config import CoServingConfig
from workers.keeper.launch import (
    KEY_MIDDLEWARE,
    KEY_VARIABLE,
    Device,
    EngineKeys,
    LaunchSpec,
    Start,
    engine_command,
)
from workers.profiles import StartingKnowledge

KEYS = EngineKeys("the key of engines", "the key of transfers")
SPEC = LaunchSpec(
    engine="decode-0",
    tier="decode",
    role=Role.DECODE,
    model="/models/m",
    served_name="m",
    device=Device.CPU,
    directory=Path("/state/decode-0"),
    max_context=4096,
    options=(("max-num-seqs", 8), ("structured-outputs-config", {"backend": "xgrammar"})),
    connector=ConnectorConfig(),
)
START = Start(epoch=9, http_port=1234, transfer_port=2345)


def value(argv: tuple[str, ...], option: str) -> str:
    assert argv.count(option) == 1, f"{option} in {argv}"
    return argv[argv.index(option) + 1]


def test_the_command_matches_the_launch_spec() -> None:
    argv = engine_command(SPEC, START, KEYS, {}).argv
    assert value(argv, "--port") == "1234"
    assert value(argv, "--max-model-len") == "4096"
    assert value(argv, "--max-num-seqs") == "8"
    assert json.loads(value(argv, "--structured-outputs-config")) == {"backend": "xgrammar"}
    assert "--tool-call-parser" not in argv  # it is chosen for the model


def test_the_connector_gets_the_values_of_this_start() -> None:
    transfer = json.loads(value(engine_command(SPEC, START, KEYS, {}).argv, "--kv-transfer-config"))
    extra = ConnectorConfig.from_extra_config(transfer["kv_connector_extra_config"])
    assert (extra.engine, extra.epoch, extra.port) == ("decode-0", 9, 2345)
    assert extra.control_socket == "/state/decode-0/engine.sock"


def test_nixl_transfers_kv_and_our_connector_retains_it() -> None:
    spec = replace(SPEC, connector=ConnectorConfig(backend="nixl"))
    command = engine_command(spec, START, KEYS, {})
    transfer = json.loads(value(command.argv, "--kv-transfer-config"))
    names = [one["kv_connector"] for one in transfer["kv_connector_extra_config"]["connectors"]]
    assert names == ["NixlConnector", "ConServeConnector"]
    assert command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "2345"


def test_keys_are_in_the_environment_and_not_in_the_command_line() -> None:
    command = engine_command(SPEC, START, KEYS, {})
    assert (command.env[KEY_VARIABLE], command.env[SECRET_VARIABLE]) == (KEYS.http, KEYS.transfer)
    assert not any(key in " ".join(command.argv) for key in (KEYS.http, KEYS.transfer))


@pytest.mark.parametrize("options", [(), (("middleware", "somebody.Else"),)])
def test_the_engine_key_is_checked_before_middleware_of_the_fleet(
    options: tuple[tuple[str, object], ...],
) -> None:
    argv = engine_command(replace(SPEC, options=options), START, KEYS, {}).argv
    asked = [argv[at + 1] for at, option in enumerate(argv) if option == "--middleware"]
    # vLLM's server calls the last one first.
    assert asked.count(KEY_MIDDLEWARE) == 1 and asked[-1] == KEY_MIDDLEWARE


def test_every_middleware_can_be_imported() -> None:
    argv = engine_command(SPEC, START, KEYS, {}).argv
    named = [argv[at + 1] for at, option in enumerate(argv) if option == "--middleware"]
    assert len(named) == 5
    for name in named:
        module, _, kind = name.rpartition(".")
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        assert f"\nclass {kind}:" in Path(spec.origin).read_text()


def test_an_engine_option_of_the_fleet_file_replaces_ours() -> None:
    spec = replace(SPEC, options=(("tool-call-parser", "llama3_json"), ("enable-prefix-caching", False)))
    argv = engine_command(spec, START, KEYS, {}).argv
    assert value(argv, "--tool-call-parser") == "llama3_json"
    assert "--no-enable-prefix-caching" in argv
    assert "--enable-prefix-caching" not in argv


def test_variables_of_ray_do_not_reach_an_engine() -> None:
    around = {"RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1", "HOME": "/h", "PATH": os.environ["PATH"]}
    env = engine_command(SPEC, START, KEYS, around).env
    assert "RAY_JOB_ID" not in env
    assert "OMP_NUM_THREADS" not in env
    assert env["HOME"] == "/h"


@pytest.mark.parametrize("device", Device)
def test_every_engine_uses_the_model_runner_that_was_verified(device: Device) -> None:
    """The fleet file can choose another model runner; the environment of the user cannot."""
    spec, around = replace(SPEC, device=device), {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert engine_command(spec, START, KEYS, around).env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    spec = replace(spec, env=tuple(around.items()))
    assert engine_command(spec, START, KEYS, {}).env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_measurements_of_similar_engines_reach_an_engine_at_its_start() -> None:
    """Measurements are not part of an engine's fingerprint, so a keeper with newer ones may adopt it."""
    spec = replace(SPEC, additional=json.dumps(CoServingConfig().to_additional_config()))
    known = StartingKnowledge({"engines like it": {"per_token": 1e-4}}, 400.0)
    argv = engine_command(spec, replace(START, known=known), KEYS, {}).argv
    told = CoServingConfig.from_additional_config(json.loads(value(argv, "--additional-config")))
    assert told == CoServingConfig(profiles=known.profiles, power_cap_w=400.0)


def test_different_launch_specs_have_different_fingerprints() -> None:
    others = [replace(SPEC, model="/models/n"), replace(SPEC, options=()), replace(SPEC, host="10.0.0.1")]
    assert len({spec.fingerprint() for spec in (SPEC, replace(SPEC), *others)}) == 4


def test_an_engine_with_another_control_socket_version_is_not_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An upgraded keeper could neither read the reports of an older engine nor send it commands."""
    before = SPEC.fingerprint()
    monkeypatch.setattr("kvtransfer.control.control_socket.VERSION", -1)
    assert SPEC.fingerprint() != before


def test_media_are_decoded_within_bounds_and_fetched_without_redirects() -> None:
    """A redirect could lead outside --allowed-media-domains. Only the fleet file can permit redirects."""
    names = "VLLM_MAX_IMAGE_PIXELS", "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
    others = dict.fromkeys(names, "1")
    env = engine_command(SPEC, START, KEYS, others).env
    assert [env[name] for name in names] == [str(8192 * 8192), "0"]
    changed = engine_command(replace(SPEC, env=tuple(others.items())), START, KEYS, {}).env
    assert [changed[name] for name in names] == ["1", "1"]
