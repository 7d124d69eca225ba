"""Modifies fleet files, starts and stops fleets by the command line, and reads their metrics."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import yaml
from pydantic import BaseModel

from deploy.fleet import FleetSpec
from deploy.home import FleetHome
from deploy.lifecycle.status import serving
from workers.processes import free_port

ROOT = Path(__file__).parents[2]
RANDOM = ROOT / "configs" / "random.yaml"
CO_SERVING = ROOT / "configs" / "co-serving.yaml"
UP_LIMIT_S, DOWN_LIMIT_S = 600.0, 60.0

Spec = TypeVar("Spec", bound=BaseModel)


def changed(spec: Spec, **changes: Any) -> Spec:
    """Return a changed copy of a spec. A mapping changes only the keys that it names, in nested specs too."""
    return spec.model_copy(
        update={name: _merged(getattr(spec, name), value) for name, value in changes.items()}
    )


def _merged(old: Any, new: Any) -> Any:
    if isinstance(new, dict):
        if isinstance(old, BaseModel):
            return changed(old, **new)
        if isinstance(old, dict):
            return {**old, **new}
    return new


@contextmanager
def brought_up(fleet: FleetSpec, limit_s: float = UP_LIMIT_S) -> Iterator[FleetHome]:
    """Run a fleet by `conserve up`, yield its home, and take it down afterwards, also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="bench-") as base:
        try:
            _up(base, fleet, free_port("127.0.0.1"), limit_s)
            yield FleetHome.of(fleet.name, base)
        finally:
            _conserve(base, "down", fleet.name, limit_s=DOWN_LIMIT_S)


def change(home: FleetHome, fleet: FleetSpec) -> None:
    """Change a running fleet by another `conserve up` with the spec `fleet`."""
    _up(str(home.root.parents[1]), fleet, urlsplit(serving(home).endpoint).port or 0, UP_LIMIT_S)


def _up(base: str, fleet: FleetSpec, port: int, limit_s: float) -> None:
    file = Path(base) / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet.model_dump(mode="json", exclude_unset=True)))
    _conserve(base, "up", str(file), "--detach", "--port", str(port), limit_s=limit_s)


@contextmanager
def up(fleet: FleetSpec, limit_s: float = UP_LIMIT_S) -> Iterator[str]:
    """Run a fleet and yield the URL of its gateway."""
    with brought_up(fleet, limit_s) as home:
        yield serving(home).endpoint


def _conserve(base: str, *arguments: str, limit_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        env={**os.environ, "CONSERVE_HOME": base, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"conserve {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def samples(pages: Iterable[str], *names: str) -> dict[str, float]:
    """Return the metrics whose names begin with one of `names`, summed over `pages` by name and labels."""
    found: dict[str, float] = {}
    for page in pages:
        for line in httpx.get(f"{page}/metrics", timeout=30).text.splitlines():
            if line.startswith(names):
                name, _, value = line.rpartition(" ")
                found[name] = found.get(name, 0.0) + float(value)
    return found


def counted(pages: Iterable[str], name: str, **labels: str) -> float:
    """Return the sum of a metric over all series on `pages` that have the given labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for key, value in samples(pages, name).items()
        if key.partition("{")[0] == name and all(one in key for one in wanted)
    )
