"""python -m deploy.generated: write what is made from code: the schema, the metrics page, Grafana's JSON."""

import json
from pathlib import Path

from deploy.fleet import FleetSpec
from deploy.observe import catalogue, dashboards

ROOT = Path(__file__).resolve().parents[1]
SCHEMA_FILE = ROOT / "configs" / "fleet.schema.json"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
GRAFANA = ROOT / "deploy" / "grafana"


def fleet_schema() -> str:
    """What editors complete fleet files by."""
    schema = FleetSpec.model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def generated() -> dict[Path, str]:
    """Every file that is made, and its content."""
    grafana = {GRAFANA / f"{one.name}.json": dashboards.text(one) for one in dashboards.DASHBOARDS}
    return {SCHEMA_FILE: fleet_schema(), METRICS_PAGE: catalogue.page(), **grafana}


if __name__ == "__main__":
    for file, content in generated().items():
        if not file.exists() or file.read_text() != content:
            file.write_text(content)
            print(f"written: {file.relative_to(ROOT)}")
