"""Reader of an engine's log: its last lines, the stage of a start, and the likely cause of a failure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
_STAGE_PATTERNS = tuple((re.compile(pattern), stage) for pattern, stage in _STAGES)
_NOISE = re.compile(r"\x1b\[[0-9;]*m|\r")


def last_lines(log: Path, count: int = 25, window: int = 64 << 10, since: int = 0) -> list[str]:
    """Return the last `count` lines after the offset `since`, from the last `window` bytes of the log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - window))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in _NOISE.sub("", text).splitlines() if line.strip()][-count:]


def log_size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def start_stage(lines: list[str]) -> str:
    """Return the latest stage of a start that the lines of the log mention."""
    for line in reversed(lines):
        for pattern, name in _STAGE_PATTERNS:
            if pattern.search(line):
                return name
    return "importing vLLM"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Likely cause of a failure, and what to do about it."""

    cause: str
    advice: str
    evidence: str  # the line of the log that showed the cause
    excerpt: tuple[str, ...]  # the lines around the evidence, or the last lines

    def __str__(self) -> str:
        return f"{self.cause}: {self.advice}" + (f" (log: {self.evidence})" if self.evidence else "")


# The first cause that matches is named, so causes that lead to other error lines come first.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"unrecognized arguments|error: argument |invalid choice|error: ambiguous option|"
        r"error: the following arguments are required",
        "wrong argument",
        "correct engine.args or the tier's args in the fleet file",
    ),
    (
        r"Address already in use|address already in use|Errno 98",
        "port taken",
        "another process listens on it; the next start tries another port",
    ),
    (
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory",
        "out of GPU memory",
        "lower gpu-memory-utilization or max-num-seqs, raise tensor-parallel-size, or free the GPU",
    ),
    (
        r"No available memory for the cache blocks|larger than the maximum number of tokens that can be "
        r"stored|larger than the available KV cache memory|less than desired (GPU|CPU) memory utilization|"
        r"Free memory on device .* less than desired",
        "not enough memory for KV",
        "lower model.max_context, or give the engine more (gpu-memory-utilization, VLLM_CPU_KVCACHE_SPACE)",
    ),
    (
        r"MemoryError|Cannot allocate memory|DefaultCPUAllocator: can't allocate memory|"
        r"can't allocate memory: you tried to allocate|Killed$|died with .*SIGKILL|exit ?code:? -9",
        "out of memory",
        "lower kv.host_kv_gib, num-gpu-blocks-override or the number of engines on this host",
    ),
    (
        r"No CUDA GPUs are available|Found no NVIDIA driver|no NVIDIA GPU|libcuda\.so\.1|"
        r"Failed to infer device type|CUDA driver initialization failed",
        "missing GPU",
        "set engine.device to cpu, or give the tier a GPU in its resources and check nvidia-smi",
    ),
    (
        r"Repository Not Found|is not a local folder and is not a valid model identifier|"
        r"We couldn't connect to .*huggingface|OfflineModeIsEnabled|LocalEntryNotFoundError|"
        r"Invalid repository ID|does not appear to have a file named config\.json|HFValidationError",
        "model not found",
        "check model.path: a directory with config.json, or a Hugging Face id this host can download",
    ),
    (
        r"gated repo|401 Client Error|Access to model .* is restricted",
        "no access to the model",
        "accept its licence and set HF_TOKEN in engine.env",
    ),
    (
        r"User-specified max_model_len .* is greater than the derived max_model_len",
        "context too long for the model",
        "lower model.max_context",
    ),
    (
        r"must hold the fleet's secret|unknown connector settings|ConnectorConfigError",
        "wrong transfer settings",
        "check the blocks transfer and kv of the fleet file",
    ),
    (
        r"operator torchvision::nms does not exist",
        "torchvision of another build than torch",
        "pip uninstall -y torchvision torchaudio torchcodec: serving text needs none of them",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "broken installation",
        "run make up again: it repairs the virtual environment",
    ),
    (
        r"validation error for|ValidationError|pydantic_core",
        "wrong argument",
        "a value in engine.args or the tier's args is not what vLLM accepts",
    ),
)
_CAUSE_PATTERNS = tuple((re.compile(pattern), cause, advice) for pattern, cause, advice in _CAUSES)


def diagnose(lines: Sequence[str]) -> Diagnosis:
    """Return the likely cause of a failure that the lines of a log show."""
    for pattern, cause, advice in _CAUSE_PATTERNS:
        for index, line in reversed(list(enumerate(lines))):  # a traceback ends with its exception
            if pattern.search(line):
                return Diagnosis(cause, advice, _short(line), _around(lines, index))
    for index, line in enumerate(lines):
        if _ERROR.search(line) and "See root cause above" not in line:
            return Diagnosis("unknown cause", "read its log", _short(line), _around(lines, index))
    return Diagnosis("unknown cause", "read its log", _short(lines[-1]) if lines else "", tuple(lines[-12:]))


_ERROR = re.compile(r"\b\w*(Error|Exception)\b: ")


def _around(lines: Sequence[str], index: int) -> tuple[str, ...]:
    return tuple(lines[max(0, index - 7) : index + 5])


def _short(line: str) -> str:
    return re.sub(r"^\(\w+ pid=\d+\)\s*", "", line.strip())[:300]
