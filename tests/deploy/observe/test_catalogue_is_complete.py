"""The metric catalogue has every metric, and dashboards and alerts use no other."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from deploy.generated import ROOT
from deploy.observability.dashboards import DASHBOARDS, SOURCES, catalogue

COMPONENTS = ("placement", "kvtransfer", "router", "workers", "traces", "deploy")
KINDS = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
RULES = ROOT / "deploy" / "observability" / "prometheus" / "conserve.rules.yml"
OPERATORS_PAGE = ROOT / "docs" / "operate.md"
FORBIDDEN_LABELS = {"conversation", "conversation_id", "request", "request_id", "key", "user", "session"}
NAME = re.compile(r"\b(?:conserve_|vllm:)[a-z0-9_:]+")
VLLM = {  # tested against a real engine's page by tests marked `fleet`
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
}


def expressions() -> list[tuple[str, str]]:
    panels = [(f"{d.name}: {p.title}", p) for d in DASHBOARDS for p in d.panels]
    found = [(where, expression) for where, panel in panels for expression in panel.lines.values()]
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return found + [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
    return set(NAME.findall(re.sub(r"\{[^}]*\}", "", expression)))


def compared(expression: str) -> str:
    """Return an alert's expression without its comparison, because with it a quiet alert returns no data."""
    return re.split(r" (?:>|<|==) (?=[0-9.]+(?:$| ))", expression.replace("\n", " ").strip())[0]


def series() -> set[str]:
    names = set(VLLM)
    for metric in catalogue().values():
        endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + ending for ending in endings}
    return names


def test_every_metric_is_declared_in_a_module_that_the_metrics_page_reads() -> None:
    known = {ROOT / (source.module.replace(".", "/") + ".py") for source in SOURCES}
    for component in COMPONENTS:
        for path in (ROOT / component).rglob("*.py"):
            made = _made(path)
            if made and path not in known:
                assert path.name == "vllm_stats.py", f"{path} declares metrics: {made}"


def _made(path: Path) -> set[str]:
    """Return the kinds of prometheus_client metrics that a file creates; type annotations do not count."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "prometheus_client"]
    kinds = {alias.name for node in imports for alias in node.names} & KINDS
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return kinds & called


def test_metric_names_and_help_texts_and_labels_follow_our_rules() -> None:
    for metric in catalogue().values():
        assert re.fullmatch(r"(?:conserve|gen_ai_server)_[a-z0-9_]+", metric.name), metric.name
        assert metric.help.endswith(".") and len(metric.help) > 15, metric.name
        assert not FORBIDDEN_LABELS & set(metric.labels), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_panels_and_alerts_use_only_metrics_that_exist(where: str, expression: str) -> None:
    names = metrics_in(expression)
    assert names
    assert names <= series(), f"{where}: {sorted(names - series())}"


def test_every_metric_in_operate_md_has_a_panel_or_an_alert() -> None:
    shown = {name for _, expression in expressions() for name in metrics_in(expression)}
    shown |= {name.removesuffix("_bucket") for name in shown}
    named = set(NAME.findall(OPERATORS_PAGE.read_text()))
    assert named and named <= shown, sorted(named - shown)


def test_every_alert_says_what_to_do() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["runbook"]) > 30
