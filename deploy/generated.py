"""python -m deploy.generated: write the files made from code: JSON schema, metrics page, dashboards."""

import json
from pathlib import Path
from typing import Any

from deploy.fleet import FleetSpec
from deploy.observability.dashboards import DASHBOARDS, SOURCES, Dashboard, Panel, metrics_of

ROOT = Path(__file__).resolve().parents[1]
SCHEMA_FILE = ROOT / "configs" / "fleet.schema.json"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
GRAFANA = ROOT / "deploy" / "observability" / "grafana"


def fleet_schema() -> str:
    """Return the JSON schema with which editors complete fleet files."""
    schema = FleetSpec.model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def metrics_page() -> str:
    parts = [
        "# Metrics",
        "",
        "Made by `python -m deploy.generated` from the modules named below; do not edit.",
        "Histograms have `_bucket`, `_sum` and `_count` series. No label holds a conversation, a request",
        "or a key. Targets for Prometheus: `conserve targets`; dashboards: `deploy/observability/grafana/`; "
        "alerts:",
        "`deploy/observability/prometheus/`.",
    ]
    for source in SOURCES:
        parts += ["", f"## {source.title}", ""]
        parts += [f"`{source.module}` declares these metrics, which are on {source.page}.", ""]
        parts += ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for metric in metrics_of(source):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(parts) + "\n"


DATASOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 12, 8  # of a panel on Grafana's grid of 24 columns


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"conserve-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["conserve"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "links": [{"type": "dashboards", "tags": ["conserve"], "title": "ConServe", "asDropdown": True}],
        "panels": [_panel(panel, index) for index, panel in enumerate(dashboard.panels)],
    }


def _panel(panel: Panel, index: int) -> dict[str, Any]:
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"x": index % 2 * WIDTH, "y": index // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for at, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


def dashboard_text(dashboard: Dashboard) -> str:
    return json.dumps(grafana(dashboard), indent=1) + "\n"


def generated() -> dict[Path, str]:
    """Return the content of every generated file."""
    boards = {GRAFANA / f"{one.name}.json": dashboard_text(one) for one in DASHBOARDS}
    return {SCHEMA_FILE: fleet_schema(), METRICS_PAGE: metrics_page(), **boards}


if __name__ == "__main__":
    for file, content in generated().items():
        if not file.exists() or file.read_text() != content:
            file.write_text(content)
            print(f"written: {file.relative_to(ROOT)}")
