"""Generated files equal the output of the code that makes them."""

import json
from pathlib import Path

import pytest

from deploy.generated import GRAFANA, generated

GENERATED = generated()


@pytest.mark.parametrize("file", GENERATED, ids=lambda file: file.name)
def test_each_generated_file_equals_what_the_code_generates_now(file: Path) -> None:
    assert file.read_text() == GENERATED[file], "run: python -m deploy.generated"


def test_no_grafana_file_remains_without_a_dashboard_definition() -> None:
    assert set(GRAFANA.glob("*.json")) == {file for file in GENERATED if file.parent == GRAFANA}
    assert all(json.loads(file.read_text())["panels"] for file in GRAFANA.glob("*.json"))
