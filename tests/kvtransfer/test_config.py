import pytest

from kvtransfer.config import ConnectorConfig, ConnectorConfigError, transfer_secret
from kvtransfer.plugins import plugin_paths


def test_settings_are_unchanged_after_they_pass_through_the_command_line() -> None:
    config = ConnectorConfig(engine="d0", epoch=3, port=5000, plugins=("a:B",))
    assert ConnectorConfig.from_extra_config(config.to_extra_config()) == config


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(ConnectorConfigError, match="lease_seconds"):
        ConnectorConfig.from_extra_config({"lease_seconds": 3})


@pytest.mark.parametrize("wrong", [{"lease_s": 0}, {"host_kv_gib": -1}, {"port": 70000}])
def test_impossible_connector_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConnectorConfigError):
        ConnectorConfig.from_extra_config(wrong)


def test_nixl_transfers_kv_and_our_connector_retains_it() -> None:
    config = ConnectorConfig(backend="nixl", host="10.0.0.1", port=5600, host_kv_gib=2)
    argument = config.to_kv_transfer_config()
    moving, keeping = argument["kv_connector_extra_config"]["connectors"]
    assert argument["kv_connector"] == "SeveralConnectors" and moving["kv_connector"] == "NixlConnector"
    assert ConnectorConfig.from_extra_config(keeping["kv_connector_extra_config"]) == config
    assert config.environment()["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    names = [part.split(":")[1] for part in plugin_paths(config)]
    assert "TransferPlugin" not in names and "CheckpointPlugin" in names


def test_a_shared_tier_is_asked_last_and_with_a_short_time_out() -> None:
    config = ConnectorConfig(host_kv_gib=2, lmcache="127.0.0.1:5555", lmcache_timeout_s=0.5)
    ours, tier = config.to_kv_transfer_config()["kv_connector_extra_config"]["connectors"]
    assert ours["kv_connector"] == "ConServeConnector"
    assert tier["kv_connector_extra_config"]["lmcache.mp.mq_timeout"] == 0.5
    with pytest.raises(ConnectorConfigError, match="safepoint"):
        ConnectorConfig(lmcache="127.0.0.1:5555", safepoint="page")
    with pytest.raises(ConnectorConfigError, match="host:port"):
        ConnectorConfig(lmcache="somewhere")


def test_a_missing_secret_is_refused() -> None:
    with pytest.raises(ConnectorConfigError, match="CONSERVE_TRANSFER_SECRET"):
        transfer_secret({})
