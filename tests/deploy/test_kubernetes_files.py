"""The Kubernetes manifests against the schemas of Kubernetes, also the pods that KubeRay embeds."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.fleet import load_fleet

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "1.31"
DOCUMENTS = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "fleet.yaml").read_text()))
RAY_JOB = next(document for document in DOCUMENTS if document["kind"] == "RayJob")
GROUPS = [
    RAY_JOB["spec"]["rayClusterSpec"]["headGroupSpec"],
    *RAY_JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"],
]


def fleet() -> dict[str, Any]:
    config = next(document for document in DOCUMENTS if document["kind"] == "ConfigMap")
    return yaml.safe_load(config["data"]["fleet.yaml"])


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d["kind"] != "RayJob"], ids=lambda document: document["kind"]
)
def test_kubernetes_accepts_the_object(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.get("groupName", "head"))
def test_kubernetes_accepts_the_pods_of_each_group(group: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checked"}, **group["template"]}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_a_misspelt_field_is_refused() -> None:
    service = next(document for document in DOCUMENTS if document["kind"] == "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {"prots": []}}, KUBERNETES, strict=True)


def test_the_fleet_in_the_config_map_is_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet()))
    load_fleet(path)


def test_each_tier_has_a_group_of_nodes_with_its_resource_and_enough_of_them() -> None:
    for tier in fleet()["tiers"]:
        (custom,) = (name for name in tier["resources"] if name != "GPU")
        groups = [group for group in GROUPS if custom in group["rayStartParams"].get("resources", "")]
        assert sum(group["replicas"] for group in groups) == tier["replicas"], tier["name"]


def test_every_node_is_patient_with_a_head_that_is_away() -> None:
    for group in GROUPS:
        (container,) = group["template"]["spec"]["containers"]
        names = {variable["name"] for variable in container["env"]}
        assert "RAY_gcs_rpc_server_reconnect_timeout_s" in names
