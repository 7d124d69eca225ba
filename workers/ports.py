"""Ports that the operating system says are free."""

import socket


def free_port(host: str) -> int:
    """A port that was free a moment ago. Who loses it to another process fails to start and tries again."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
