"""Processes of `benchmarks.observe`: a gateway without metrics, and an OTLP receiver that keeps nothing."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import prometheus_client
from aiohttp import web


class NoMetric:
    """In place of a counter, gauge or histogram."""

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def labels(self, *values: object) -> "NoMetric":
        return self

    def inc(self, amount: float = 1.0) -> None: ...

    def dec(self, amount: float = 1.0) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...

    def remove(self, *values: object) -> None: ...

    def track_inprogress(self) -> AbstractContextManager[None]:
        return nullcontext()


def gateway_without_metrics(arguments: list[str]) -> int:
    for kind in ("Counter", "Gauge", "Histogram"):
        setattr(prometheus_client, kind, NoMetric)
    from router.gateway import main  # only now: its modules make their metrics when they are loaded

    return main(arguments)


def receiver(port: int) -> None:
    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", take)
    app.router.add_get("/health", health)
    options: dict[str, Any] = {"host": "127.0.0.1", "port": port, "access_log": None}
    web.run_app(app, print=None, **options)


if __name__ == "__main__":
    if sys.argv[1] == "receiver":
        receiver(int(sys.argv[2]))
    else:
        sys.exit(gateway_without_metrics(sys.argv[2:]))
