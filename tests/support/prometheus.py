"""Real Prometheus (Debian's package) with the shipped configuration and rules, but more frequent scrapes."""

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.observe.test_catalogue_is_complete import RULES
from workers.processes import free_port

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
MISSING = "needs Debian's prometheus package: deploy/setup/packages.sh"
WINDOW = "1m"  # the value of Grafana's $__rate_interval
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Prometheus:
    url: str
    log: Path
    began: float

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=20
        ) as answer:
            return json.load(answer)["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=_filled(expression))["result"]
        return found

    def numbers(self, expression: str) -> list[float]:
        """Return all values that an expression has had so far, except results of divisions by zero."""
        now = time.time()
        times = {"start": str(self.began), "end": str(now), "step": str(max(1.0, (now - self.began) / 200))}
        found = self.get("/api/v1/query_range", query=_filled(expression), **times)["result"]
        values = (float(value) for series in found for _, value in series["values"])
        return [value for value in values if math.isfinite(value)]

    def until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + _LIMIT_S
        while not true():
            assert time.monotonic() < end, f"waited for {what}: {self.log.read_text()[-2000:]}"
            time.sleep(0.3)


@contextmanager
def prometheus(folder: Path, scrape_interval: str, **discovery: Any) -> Iterator[Prometheus]:
    """Run Prometheus. `discovery` replaces the file discovery of the shipped configuration."""
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": scrape_interval, "evaluation_interval": "1s"}
    (scrape,) = config["scrape_configs"]
    if discovery:
        scrape.pop("file_sd_configs")
        scrape.update(discovery)
    shutil.copy(RULES, folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    arguments = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with (folder / "log").open("w") as log:
        command = [str(PROMETHEUS), *arguments, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    running = Prometheus(f"http://{address}", folder / "log", time.time())
    try:
        running.until(lambda: _answers(running), "its start")
        yield running
    finally:
        process.terminate()
        process.wait(30)


def _answers(running: Prometheus) -> bool:
    try:
        running.ask("1")
    except OSError:
        return False
    return True


def _filled(expression: str) -> str:
    return expression.replace("$__rate_interval", WINDOW)
