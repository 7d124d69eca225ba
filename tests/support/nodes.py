"""A Ray cluster of several nodes on this machine, each with its own address, resources and process tree."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from deploy.ray.cluster import common_environment, ray_command
from workers.processes import free_port

START_LIMIT_S = 180
HEAD_HOST = "127.0.0.2"


class Nodes:
    """Ray head with its nodes; each is a process tree that a test can kill."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="conserve-ray-"))
        token = self.directory / "token"
        token.write_text(secrets.token_urlsafe(16))
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self.address = f"{HEAD_HOST}:{free_port(HEAD_HOST)}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_head(self, resources: dict[str, float]) -> None:
        port = self.address.rsplit(":", 1)[1]
        client = str(free_port(HEAD_HOST))
        head = ["--head", "--port", port, "--ray-client-server-port", client]
        head += ["--temp-dir", str(self.directory / "t"), "--include-dashboard", "false", "--no-monitor"]
        self._start("head", HEAD_HOST, resources, head)
        self._until_up("head")

    def join(self, hosts: dict[str, str], resources: dict[str, dict[str, float]]) -> None:
        """Start nodes on the given hosts with the given resources, both by node name.

        They start one after another, because Ray sometimes misses one of several nodes that start together.
        """
        for name, host in hosts.items():
            self._start(name, host, resources[name], ["--address", self.address])
            self._until_up(name)

    def lose(self, name: str) -> None:
        """Kill the raylet, its workers and their children at once, as a power failure does."""
        kill_tree(self._processes.pop(name))

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            kill_tree(process)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, name: str, host: str, resources: dict[str, float], arguments: list[str]) -> None:
        log = self.directory / f"{name}.log"
        argv = [*ray_command(), "start", "--block", *arguments, "--node-ip-address", host]
        argv += ["--num-cpus", "0", "--resources", json.dumps(resources), "--disable-usage-stats"]
        argv += ["--object-store-memory", str(100 << 20), "--include-log-monitor", "false"]
        env = {**common_environment(os.environ), **self.environment}
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._processes[name] = process

    def _until_up(self, name: str) -> None:
        process, log = self._processes[name], self.directory / f"{name}.log"
        deadline = time.monotonic() + START_LIMIT_S
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process.pid)
        root.suspend()  # so that it starts no child after its children were listed
        tree = [*root.children(recursive=True), root]
        for one in tree:
            with contextlib.suppress(psutil.Error):
                one.kill()
    process.wait()
