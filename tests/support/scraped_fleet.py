"""Real Prometheus that finds the pages of a live fleet by HTTP discovery, as on another machine."""

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.fleet import ROOT, RunningFleet, environment
from tests.support.prometheus import Prometheus, prometheus


@contextmanager
def scraped(fleet: RunningFleet, folder: Path) -> Iterator[Prometheus]:
    """Yield a Prometheus that has scraped every page of the fleet at least twice."""
    serve = [sys.executable, "-m", "deploy.cli", "targets", fleet.fleet.name, "--serve", "127.0.0.1:0"]
    process = subprocess.Popen(
        serve, env=environment(fleet.base), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and select.select([process.stdout], [], [], 120)[0]
        url = process.stdout.readline().partition("url: ")[2].strip().rstrip("}]")
        pages = [{"url": url, "refresh_interval": "5s"}]
        with prometheus(folder, "1s", http_sd_configs=pages) as running:
            count = 3 + 2 * len(fleet.engines())  # 3 processes; engines and keepers
            running.until(lambda: len(running.ask("count_over_time(up[1m]) > 1")) == count, f"{count} pages")
            yield running
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
