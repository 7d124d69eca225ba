"""Carries the plugins' counts through vLLM to the engine's `/metrics`."""

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtransfer.config import ConnectorConfig
from kvtransfer.metrics import COUNTERS, HistogramSpec
from kvtransfer.plugins import selected_plugins


class ConnectorStats(KVConnectorStats):
    """Counts since the last report, and lists of values for histograms, by short name."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        for name, count in other.data.items():
            self.data[name] = self.data[name] + count if name in self.data else count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return numbers for vLLM's log line: counts, and the number of values of each histogram."""
        return {name: len(got) if isinstance(got, list) else got for name, got in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Prometheus counters and histograms of the connector, in vLLM's front-end process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        specs = dict(COUNTERS)
        histograms: dict[str, HistogramSpec] = {}
        for plugin in selected_plugins(ConnectorConfig.from_extra_config(extra)):
            specs |= plugin.counters
            histograms |= plugin.histograms
        self._counters = {
            key: metric_types[Counter](
                name=spec.name,
                documentation=spec.help,
                labelnames=[*labelnames, spec.label] if spec.label else labelnames,
            )
            for key, spec in specs.items()
        }
        self._histograms = {
            key: metric_types[Histogram](
                name=spec.name, documentation=spec.help, buckets=spec.buckets, labelnames=labelnames
            )
            for key, spec in histograms.items()
        }
        # Create all series now, because Prometheus does not count a series' first value as an increase.
        for labels in per_engine_labelvalues.values():
            for key, spec in specs.items():
                for value in spec.values:
                    self._counters[key].labels(*labels, value)
                if not spec.label:
                    self._counters[key].labels(*labels)
            for histogram in self._histograms.values():
                histogram.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if isinstance(count, list):
                histogram = self._histograms[name].labels(*labels)
                for value in count:
                    histogram.observe(value)
                continue
            key, _, value = name.partition(".")
            self._counters[key].labels(*labels, *([value] if value else [])).inc(count)
