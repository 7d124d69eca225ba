"""The end of an engine's log, and how far a starting engine has come by it."""

import re
from pathlib import Path

_STAGES: tuple[tuple[str, str], ...] = (
    (r"Application startup complete|Uvicorn running on", "serving"),
    (r"Starting vLLM server|Available routes are", "opening its port"),
    (
        r"init engine .* took|Warming up model|torch\.compile took|Capturing CUDA graphs",
        "warming up and compiling",
    ),
    (r"GPU KV cache size|# GPU blocks|KV cache size", "allocating KV"),
    (r"Loading weights took|Model loading took", "weights loaded"),
    (r"Starting to load model|Loading safetensors|Loading weights", "loading weights"),
    (r"Initializing a V1 LLM engine", "starting its engine process"),
    (r"vLLM API server version|Resolved architecture", "reading the model's configuration"),
)
_COMPILED = tuple((re.compile(pattern), stage) for pattern, stage in _STAGES)
_NOISE = re.compile(r"\x1b\[[0-9;]*m|\r")


def last_lines(log: Path, count: int = 25, window: int = 64 << 10, since: int = 0) -> list[str]:
    """The last lines written after offset `since`, the start of this epoch in the log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - window))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in _NOISE.sub("", text).splitlines() if line.strip()][-count:]


def size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def stage(lines: list[str]) -> str:
    """The furthest stage that the lines tell of, in words."""
    for line in reversed(lines):
        for pattern, name in _COMPILED:
            if pattern.search(line):
                return name
    return "importing vLLM"
