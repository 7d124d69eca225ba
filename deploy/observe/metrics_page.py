"""A /metrics page for a process that serves nothing else over HTTP."""

from prometheus_client import start_http_server


def serve_metrics(host: str) -> str:
    """Serve until the process ends, on a port the system chooses; gives host:port."""
    server, _ = start_http_server(0, addr=host)
    return f"{host}:{server.server_port}"
