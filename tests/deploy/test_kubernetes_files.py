"""The Kubernetes manifests, and the pods embedded for KubeRay, conform to the schemas of Kubernetes."""

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
SUBMITTER = {"groupName": "submitter", "template": RAY_JOB["spec"]["submitterPodTemplate"]}


def fleet() -> dict[str, Any]:
    config = next(document for document in DOCUMENTS if document["kind"] == "ConfigMap")
    return yaml.safe_load(config["data"]["fleet.yaml"])


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if d["kind"] != "RayJob"], ids=lambda document: document["kind"]
)
def test_kubernetes_accepts_every_object_of_the_manifest(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("group", [*GROUPS, SUBMITTER], ids=lambda group: group.get("groupName", "head"))
def test_kubernetes_accepts_the_pods_of_each_group_of_ray_nodes(group: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checked"}, **group["template"]}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_kubernetes_refuses_a_manifest_with_a_misspelt_field() -> None:
    service = next(document for document in DOCUMENTS if document["kind"] == "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {"prots": []}}, KUBERNETES, strict=True)


def test_the_fleet_file_in_the_kubernetes_config_map_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet()))
    load_fleet(path)


def test_the_kubernetes_cluster_has_enough_nodes_for_each_tier() -> None:
    for tier in fleet()["tiers"]:
        (custom,) = (name for name in tier["resources"] if name != "GPU")
        groups = [group for group in GROUPS if custom in group["rayStartParams"].get("resources", "")]
        assert sum(group["replicas"] for group in groups) == tier["replicas"], tier["name"]


def test_every_kubernetes_node_tolerates_a_lost_head_and_leaves_memory_kills_to_the_kernel() -> None:
    for group in GROUPS:
        (container,) = group["template"]["spec"]["containers"]
        names = {variable["name"] for variable in container["env"]}
        assert "RAY_gcs_rpc_server_reconnect_timeout_s" in names
        assert {"RAY_memory_monitor_refresh_ms", "RAY_worker_oom_score_adj"} < names


def test_the_ray_cluster_on_kubernetes_requires_a_token() -> None:
    options = RAY_JOB["spec"]["rayClusterSpec"]["authOptions"]
    assert options == {"mode": "token", "secretName": "conserve-ray-token"}
    text = (ROOT / "deploy" / "kubernetes" / "fleet.yaml").read_text()
    assert "secret generic conserve-ray-token --from-literal=auth_token=" in text


@pytest.mark.parametrize("group", [*GROUPS, SUBMITTER], ids=lambda group: group.get("groupName", "head"))
def test_kubernetes_pods_run_as_a_plain_user_without_capabilities(group: dict[str, Any]) -> None:
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert pod["automountServiceAccountToken"] is False
    allowed = container["securityContext"]
    assert allowed == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.get("groupName", "head"))
def test_conserve_home_is_a_volume_of_every_kubernetes_pod(group: dict[str, Any]) -> None:
    (container,) = group["template"]["spec"]["containers"]
    (home,) = (one["value"] for one in container["env"] if one["name"] == "CONSERVE_HOME")
    mounted = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounted[home] in {one["name"] for one in group["template"]["spec"]["volumes"]}
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ENV CONSERVE_HOME={home}\n" in dockerfile
    assert f"--owner=conserve --group=conserve --mode=0700 {home}" in dockerfile


def test_the_network_policy_admits_clients_the_operator_and_prometheus() -> None:
    policy = next(document for document in DOCUMENTS if document["kind"] == "NetworkPolicy")["spec"]
    assert policy["podSelector"] == {} and policy["policyTypes"] == ["Ingress"]
    within, callers, operator, prometheus = policy["ingress"]
    assert within == {"from": [{"podSelector": {}}]}
    assert callers == {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert "monitoring" in str(prometheus["from"])
