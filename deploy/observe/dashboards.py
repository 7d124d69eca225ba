"""python -m deploy.observe.dashboards: write deploy/grafana/*.json from `panels.py`."""

import json
from pathlib import Path
from typing import Any

from deploy.observe.panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent.parent / "grafana"
SOURCE = {"type": "prometheus", "uid": "${source}"}
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
        "datasource": SOURCE,
        "gridPos": {"x": index % 2 * WIDTH, "y": index // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for at, (legend, expression) in enumerate(panel.lines)
        ],
    }


def text(dashboard: Dashboard) -> str:
    return json.dumps(grafana(dashboard), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(text(dashboard), encoding="utf-8")
