"""Ray's own schema and loader accept the `ray up` files, and they set everything that the fleet relies on."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "~/.ray/auth_token"
FILES = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    made = prepare_config(copy.deepcopy(config))
    validate_config(made)
    return made


def test_cluster_files_for_aws_and_on_premises_are_shipped() -> None:
    assert [path.name for path in FILES] == ["aws.yaml", "on-premises.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ray_accepts_each_cluster_file(path: Path) -> None:
    prepared(load(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ray_refuses_a_cluster_file_with_a_misspelt_key(path: Path) -> None:
    with pytest.raises(Exception, match="max_wokers"):
        prepared(load(path) | {"max_wokers": 3})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_nodes_of_a_cluster_file_outlive_a_lost_head_for_ten_minutes(path: Path) -> None:
    config = load(path)
    head, worker = config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]
    assert "RAY_gcs_storage=rocksdb" in head
    for command in (head, worker):
        assert "RAY_gcs_rpc_server_reconnect_timeout_s=600" in command


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_nodes_of_a_cluster_file_leave_memory_kills_to_the_kernel(path: Path) -> None:
    config = load(path)
    for command in (config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]):
        for setting in ("RAY_memory_monitor_refresh_ms=0", "RAY_worker_oom_score_adj=0"):
            assert re.search(rf" {setting}\b.* ~/conserve/bin/ray start ", command)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_cluster_started_by_ray_up_requires_a_token(path: Path) -> None:
    """Ray 2.60 requires no token by default, and `ray up` distributes none."""
    config = load(path)
    assert config["file_mounts"][TOKEN] == TOKEN
    assert "ray get-auth-token --generate && ray up" in path.read_text().splitlines()[0]
    for command in (config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]):
        assert re.search(r"\bRAY_AUTH_MODE=token\b.* ~/conserve/bin/ray start ", command)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_setup_command_in_a_cluster_files_first_line_works(path: Path) -> None:
    (target,) = re.findall(r"make (\w+)", path.read_text().splitlines()[0])
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_that_a_cluster_file_mounts_exists_or_is_built(path: Path) -> None:
    for source in load(path)["file_mounts"].values():
        assert source in ("dist", TOKEN) or (ROOT / source).is_file(), source


def test_the_aws_cluster_file_has_a_node_type_for_each_tier_of_the_fleet() -> None:
    config = load(ROOT / "deploy" / "ray" / "aws.yaml")
    fleet = load(ROOT / config["file_mounts"]["~/fleet.yaml"])
    offered = [node["resources"] for node in config["available_node_types"].values()]
    for tier in fleet["tiers"]:
        custom = {name for name in tier["resources"] if name not in ("CPU", "GPU")}
        assert custom and any(custom <= set(node) for node in offered), tier["name"]
