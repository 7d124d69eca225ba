"""The workflows on GitHub publish nothing that has not passed the checks."""

from typing import Any

import yaml

from tests.support.fleet import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


def workflow(name: str) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return content


def test_a_release_is_published_only_after_the_checks() -> None:
    jobs = workflow("release.yml")["jobs"]
    needs = jobs["publish"]["needs"]
    assert "./.github/workflows/checks.yml" in [jobs[name].get("uses") for name in needs]
    checks = workflow("checks.yml")
    assert "workflow_call" in checks[True]  # YAML 1.1 reads the key `on` as true
    run = [step.get("run") for job in checks["jobs"].values() for step in job["steps"]]
    assert {"make check", "make test"} <= set(run)
