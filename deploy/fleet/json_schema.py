"""python -m deploy.fleet.json_schema: write configs/fleet.schema.json, which editors complete by."""

import json
from pathlib import Path

from deploy.fleet.schema import Fleet

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "configs" / "fleet.schema.json"


def fleet_schema() -> str:
    schema = Fleet.model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(fleet_schema())
    print(f"written: {SCHEMA_FILE}")
