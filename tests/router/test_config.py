"""A gateway's configuration is read back unchanged, and an error names the field to correct."""

from pathlib import Path

import pytest

from router.auth.keys import Key, hash_secret, inline_keys
from router.errors import GatewayConfigError
from router.gateway.config import GatewayConfig, ServedModel, SloSettings, dump, load


def test_a_configuration_written_to_a_file_is_read_back_unchanged(tmp_path: Path) -> None:
    models = (ServedModel("m", ("n",)),)
    keys = (*inline_keys(("k",), ("a",)), Key("id", "owner", hash_secret("x"), models=("m",), expires=1.5))
    config = GatewayConfig("127.0.0.1:1", models, keys=keys, slos={"default": SloSettings(ttfet_s=1.5)})
    file = tmp_path / "gateway.json"
    file.write_bytes(dump(config))
    assert load(file) == config
    assert config.models_by_name["n"] == config.models[0]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"directory": "x", "models": [{"name": "m", "embed": 1}]}', "models.0.embed"),
        ('{"directory": "x", "models": [{"name": "m"}], "limits": {"max": 1}}', "limits.max"),
        ('{"directory": "x", "models": [{"name": "m"}], "policy": "best"}', "policy"),
        ('{"models": [{"name": "m"}]}', "directory"),
        ('{"directory": "x", "models": []}', "models"),
        ("{", "JSON"),
    ],
)
def test_an_error_in_a_configuration_names_the_problem(tmp_path: Path, text: str, where: str) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(text)
    with pytest.raises(GatewayConfigError, match=where):
        load(file)
