"""The HTTP layer's own counts as metrics, brought over when they are asked for."""

from collections.abc import Mapping

from prometheus_client import Counter

from router import metrics
from router.http import Server, UpstreamPool


class HttpCounts:
    def __init__(self, server: Server, pool: UpstreamPool) -> None:
        self._server = server
        self._pool = pool
        self._brought: dict[tuple[Counter, str], int] = {}

    def bring(self) -> None:
        server, pool = self._server.stats, self._pool.stats
        metrics.CLIENT_CONNECTIONS.set(server.connections)
        metrics.ENGINE_CONNECTIONS.set(pool.connections)
        self._raise(metrics.HTTP_REFUSALS, server.refusals)
        self._raise(metrics.CLIENT_TIMEOUTS, server.timeouts)
        engine = {
            "connect_failed": pool.connect_failures,
            "none_free": pool.acquire_timeouts,
            "found_dead": pool.stale_retries,
        }
        self._raise(metrics.ENGINE_CONNECTION_PROBLEMS, engine)

    def _raise(self, counter: Counter, counts: Mapping[str, int]) -> None:
        for label, count in counts.items():
            counter.labels(label).inc(count - self._brought.get((counter, label), 0))
            self._brought[counter, label] = count
