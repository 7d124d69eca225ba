"""Every metrics page of a fleet is listed once under its real address, in a file and over HTTP."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from deploy.errors import LifecycleError
from deploy.lifecycle.status import EngineStatus, FleetStatus, Targets, discovery, targets, write_targets
from deploy.observability.dashboards import catalogue
from deploy.ray.common import serve_metrics

PAGES = ("127.0.0.1:6001", "127.0.0.1:6002")
BATCH = ("127.0.0.1:6003",)


def status(*engines: EngineStatus, metrics: str = "") -> FleetStatus:
    address = "127.0.0.1:1"
    return FleetStatus("laptop", "http://g:8000", address, True, engines, metrics, PAGES, BATCH)


def engine(name: str, http: str, metrics: str = "") -> EngineStatus:
    return EngineStatus(name, "decode", "decode", "serving", http=http, metrics=metrics)


def test_the_target_list_names_every_process_with_its_component() -> None:
    found = targets(status(engine("decode-0", "127.0.0.1:9001", "10.0.0.7:7001"), metrics="127.0.0.1:7002"))
    assert [(target["labels"]["conserve_process"], *target["targets"]) for target in found] == [
        ("gateway", "127.0.0.1:6001"),  # each process: the port they share answers for one of them
        ("gateway", "127.0.0.1:6002"),
        ("batch", "127.0.0.1:6003"),
        ("directory", "127.0.0.1:7002"),
        ("engine", "127.0.0.1:9001"),
        ("keeper", "10.0.0.7:7001"),
    ]
    assert all(target["labels"]["conserve_fleet"] == "laptop" for target in found)


def test_labels_of_a_target_do_not_collide_with_labels_of_its_metrics() -> None:
    """Prometheus would keep the target's label and rename the metric's to `exported_…`, so expressions would
    find nothing."""
    found = targets(status(engine("decode-0", "127.0.0.1:9001", "10.0.0.7:7001"), metrics="127.0.0.1:7002"))
    of_pages = {label for target in found for label in target["labels"]}
    of_metrics = {label for metric in catalogue().values() for label in metric.labels}
    assert not of_pages & of_metrics
    assert all(label.startswith("conserve_") for label in of_pages)  # and vLLM's are its own


def test_processes_without_a_metrics_page_are_not_in_the_target_list() -> None:
    found = targets(status(engine("decode-0", "")))
    assert [target["labels"]["conserve_process"] for target in found] == ["gateway", "gateway", "batch"]


def test_each_listed_address_answers_with_metrics() -> None:
    address = serve_metrics("127.0.0.1")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert b"python_info" in answer.read()


def test_http_discovery_answers_with_current_targets_and_reports_a_stopped_fleet() -> None:
    looks: list[Targets | None] = [[{"targets": ["a:1"], "labels": {}}], [], None]

    def look() -> Targets:
        found = looks.pop(0)
        if found is None:
            raise LifecycleError("fleet 'laptop' is not up")
        return found

    with discovery("127.0.0.1:0", look) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        for expected in ([{"targets": ["a:1"], "labels": {}}], []):
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.headers["content-type"] == "application/json"  # Prometheus insists on it
                assert json.load(answer) == expected
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=10)
        assert refused.value.code == 503 and b"not up" in refused.value.read()
        server.shutdown()


def test_the_target_file_is_valid_json_after_each_write(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    for count in range(3):
        write_targets(path, [{"targets": ["a"], "labels": {}}] * count)
        assert len(json.loads(path.read_text())) == count
    assert [file.name for file in tmp_path.iterdir()] == ["targets.json"]
