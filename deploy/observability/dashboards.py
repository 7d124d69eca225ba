"""Catalogue of a fleet's metrics, and the Grafana dashboards that show them.

`SOURCES` names the modules that declare metrics, and `dashboards.yaml` has the panels. `generated.py` makes
docs/metrics.md and Grafana's JSON from both.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from prometheus_client.metrics import MetricWrapperBase
from pydantic import TypeAdapter

ENGINE_LABELS = ("model_name", "engine")  # vLLM puts them on what connectors count


@dataclass(frozen=True, slots=True)
class Source:
    """Module that declares metrics, and the process on whose page they appear."""

    module: str
    title: str
    page: str


ENGINE_PAGE = "an engine's `/metrics`, beside vLLM's own"
SOURCES = (
    Source("router.metrics", "Gateway and directory", "a gateway's `/metrics` and the directory's page"),
    Source("router.batch.metrics", "Batch", "the batch process's `/metrics`"),
    Source("workers.keeper.metrics", "Keepers", "a keeper's page"),
    Source("kvtransfer.metrics", "KV in engines", ENGINE_PAGE),
    Source("workers.engine.exact_tokens", "Exact tokens in engines", ENGINE_PAGE),
    Source("workers.engine.grammars.metrics", "Grammars in engines", ENGINE_PAGE),
    Source(
        "workers.engine.coserving.iterations", "Co-serving in engines", "a co-serving engine's `/metrics`"
    ),
    Source(
        "workers.engine.overload.metrics",
        "Parameter drop in engines",
        "the `/metrics` of an engine with `overload: {policy: drop}`",
    ),
)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # name as it is scraped: counters with _total
    kind: str
    labels: tuple[str, ...]
    help: str


def metrics_of(source: Source) -> list[Metric]:
    found = [*_declared(source.module)]
    of_engines = importlib.import_module(source.module)
    for spec in getattr(of_engines, "COUNTERS", {}).values():
        labels = (*ENGINE_LABELS, spec.label) if spec.label else ENGINE_LABELS
        found.append(Metric(f"{spec.name}_total", "counter", labels, spec.help))
    seen = getattr(of_engines, "HISTOGRAMS", {}).values()
    found += [Metric(spec.name, "histogram", ENGINE_LABELS, spec.help) for spec in seen]
    return sorted(found, key=lambda metric: metric.name)


def _declared(module: str) -> Iterator[Metric]:
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, MetricWrapperBase):
            for family in value.describe():
                name = f"{family.name}_total" if family.type == "counter" else family.name
                yield Metric(name, family.type, tuple(value._labelnames), family.documentation)


def catalogue() -> dict[str, Metric]:
    return {metric.name: metric for source in SOURCES for metric in metrics_of(source)}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # name of the unit in Grafana
    lines: dict[str, str]  # legend: expression


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    panels: tuple[Panel, ...]


def dashboards() -> tuple[Dashboard, ...]:
    """Return the Grafana dashboards that `dashboards.yaml` defines."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return TypeAdapter(tuple[Dashboard, ...]).validate_python(content)


DASHBOARDS = dashboards()
