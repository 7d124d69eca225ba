"""Prometheus scrapes every metric of the catalogue and evaluates every expression of panels and alerts."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from deploy.lifecycle.status import page_of
from deploy.observability.dashboards import catalogue
from tests.deploy.observe.test_catalogue_is_complete import RULES, VLLM, compared, expressions
from tests.support.prometheus import MISSING, PROMETHEUS, PROMTOOL, Prometheus, prometheus

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason=MISSING)]
KINDS = ("in_use", "live", "parked", "offline", "free", "host_used", "host_free", "disk_used", "disk_free")
VALUES = {"kind": KINDS, "met": ("yes", "no")}


def exposition(value: float) -> str:
    """Return a metrics page with each metric of the catalogue, and each label value that expressions use."""
    lines = []
    for name in sorted(VLLM):
        lines += [
            f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}",
            f'{name}{{engine="0"}} {value}',
        ]
    for metric in catalogue().values():
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        picked = next((label for label in metric.labels if label in VALUES), None)
        for choice in VALUES[picked] if picked else ("x",):
            labels = [f'{label}="{choice if label == picked else "x"}"' for label in metric.labels]
            given = ",".join(labels)
            if metric.kind == "histogram":
                for le in ("0.1", "1", "+Inf"):
                    with_le = ",".join([*labels, 'le="' + le + '"'])
                    lines.append(f"{metric.name}_bucket{{{with_le}}} {value}")
                lines += [f"{metric.name}_{part}{{{given}}} {value}" for part in ("sum", "count")]
            else:
                lines.append(f"{metric.name}{{{given}}} {value}")
    return "\n".join(lines) + "\n"


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = exposition(float(int(time.time() * 10) % 1_000_000)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    page = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=page.serve_forever, daemon=True).start()
    (folder / "targets.json").write_text(
        json.dumps([page_of(f"127.0.0.1:{page.server_port}", "fleet", "gateway")])
    )
    with prometheus(folder, "500ms") as found:
        found.until(lambda: found.ask("count_over_time(conserve_engine_up[1m]) > 5"), "scrapes")
        yield found
    page.shutdown()


def test_every_expression_of_every_panel_returns_data(running: Prometheus) -> None:
    for where, expression in expressions():
        asked = partial(running.ask, compared(expression))
        running.until(asked, f"{where}: {expression}")  # on busy cores a scrape may be late


def test_prometheus_loads_every_alert_rule(running: Prometheus) -> None:
    (group,) = running.get("/api/v1/rules")["groups"]
    written = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert len(group["rules"]) == len(written) >= 10
    assert all(rule["health"] in ("ok", "unknown") for rule in group["rules"])


def test_promtool_accepts_configuration_and_rules() -> None:
    assert PROMTOOL
    checked = subprocess.run(
        [PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
