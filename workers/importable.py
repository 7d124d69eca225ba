"""Processes of ours find our packages wherever they start, installed or not."""

import os
from collections.abc import Mapping
from pathlib import Path

SOURCE = str(Path(__file__).resolve().parents[1])


def with_our_packages(environ: Mapping[str, str]) -> dict[str, str]:
    parts = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    absolute = [os.path.abspath(part) for part in parts]
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys((SOURCE, *absolute)))}
