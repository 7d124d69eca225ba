"""Metric catalogue: docs/metrics.md, made from what modules declare; and the page that serves metrics."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import start_http_server
from prometheus_client.metrics import MetricWrapperBase

ENGINE_LABELS = ("model_name", "engine")  # vLLM puts them on what connectors count


@dataclass(frozen=True, slots=True)
class Source:
    """A file of metrics, and whose /metrics page shows them."""

    module: str
    title: str
    page: str


SOURCES = (
    Source("router.metrics", "Gateway and directory", "a gateway's `/metrics`; the directory's page"),
    Source("router.batch.metrics", "Batch", "the batch process's `/metrics`"),
    Source("workers.metrics", "Keepers", "a keeper's page"),
    Source("kvtransfer.metrics", "KV in engines", "an engine's `/metrics`, beside vLLM's own"),
    Source("workers.exact_tokens", "Exact tokens in engines", "an engine's `/metrics`, beside vLLM's own"),
    Source("workers.coserving.iterations", "Co-serving in engines", "a co-serving engine's `/metrics`"),
    Source("workers.overload.orders", "Dropping in engines", "an engine's `/metrics`, with policy drop"),
)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # as it is scraped: counters with _total
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


def page() -> str:
    parts = [
        "# Metrics",
        "",
        "Made by `python -m deploy.generated` from the modules named below; do not edit.",
        "Histograms have `_bucket`, `_sum` and `_count` series. No label holds a conversation, a request",
        "or a key. Targets for Prometheus: `conserve targets`; dashboards: `deploy/grafana/`; alerts:",
        "`deploy/prometheus/`.",
    ]
    for source in SOURCES:
        parts += ["", f"## {source.title}", "", f"`{source.module}`, on {source.page}.", ""]
        parts += ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for metric in metrics_of(source):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(parts) + "\n"


def serve_metrics(host: str) -> str:
    """Serve until the process ends, on a port the system chooses; gives host:port."""
    server, _ = start_http_server(0, addr=host)
    return f"{host}:{server.server_port}"
