"""Each purpose has its own key, derived from the fleet's token, and arguments of actors are encrypted."""

import pickle
from pathlib import Path

import pytest

from deploy.fleet import parse_fleet
from deploy.home import FleetKeys, Purpose, TokenError, token
from deploy.ray.common import SealedFleet, engine_named

TOKEN = "0123456789abcdef"
FLEET = """\
name: sealed
tiers:
  - {name: prefill, role: prefill}
  - {name: decode, role: decode, env: {HF_TOKEN: hf_in_the_environment}}
gateway:
  api_keys: [sk-in-the-fleet-file]
conversation: {ttl: 10m}
batch: {database: 'postgresql+psycopg://user:password-of-the-database@db/x'}
"""
SECRETS = ("sk-in-the-fleet-file", "hf_in_the_environment", "password-of-the-database", TOKEN)


def test_keys_differ_by_purpose_fleet_and_token() -> None:
    keys = [
        FleetKeys(given, name).of(purpose)
        for given in (TOKEN, TOKEN + "x")
        for name in ("a", "b")
        for purpose in Purpose
    ]
    assert len(set(keys)) == len(keys) == 4 * len(Purpose)
    assert FleetKeys(TOKEN, "a").of(Purpose.ENGINES) == FleetKeys(TOKEN, "a").of(Purpose.ENGINES)
    assert not any(TOKEN in key for key in keys) and all(len(key) == 64 for key in keys)


def test_the_token_is_stored_where_ray_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TokenError, match=r"RAY_AUTH_TOKEN is not set, and .*auth_token cannot be read"):
        token({})
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("by default\n")
    (tmp_path / "elsewhere").write_text("elsewhere\n")
    assert token({}) == "by default"
    assert token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "elsewhere")}) == "elsewhere"
    both = {"RAY_AUTH_TOKEN": "itself", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "elsewhere")}
    assert token(both) == "itself"
    with pytest.raises(TokenError, match="none cannot be read"):
        token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})


def test_a_guessable_token_is_refused() -> None:
    with pytest.raises(TokenError, match="shorter than 16"):
        FleetKeys("secret", "a")


def test_no_key_is_in_the_state_that_ray_keeps_of_an_actor() -> None:
    fleet, keys = parse_fleet(FLEET, "fleet.yaml"), FleetKeys(TOKEN, "sealed")
    argument = SealedFleet.of(fleet, keys)
    assert not any(secret.encode() in pickle.dumps(argument) for secret in (*SECRETS, "tiers"))
    opened = pickle.loads(pickle.dumps(argument)).opened(keys)
    assert opened == fleet and opened.model_fields_set == fleet.model_fields_set
    assert engine_named(opened, "decode-7").tier == fleet.tiers[1]
    with pytest.raises(TokenError, match="another token"):
        argument.opened(FleetKeys(TOKEN + "x", "sealed"))
