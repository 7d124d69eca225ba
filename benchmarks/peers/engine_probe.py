"""vLLM plugin that logs what an engine's processes spend their time on (`benchmarks.peers --profile`).

Every process writes a file of its own in the folder that an environment variable names. A line is one
`ProbeEvent`. The clock is the machine's, so that lines of several processes can be put beside each other.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

FOLDER = "CONSERVE_BENCHMARK_PROBE"
MODEL, SAMPLE, SCHEDULE, UPDATE, WAIT = "model", "sample", "schedule", "update", "wait"
STORE, LOAD = "store", "load"
EVENTS = "events"
GROUP = "vllm.general_plugins"


@dataclass(frozen=True)
class ProbeEvent:
    """One piece of an engine's work, with its wall time and CPU time."""

    kind: str
    at: float  # when the work ended
    seconds: float
    cpu_s: float  # CPU time of its thread
    decodes: int = 0  # requests of a scheduled iteration with one token
    prompts: int = 0  # requests of it with more tokens
    prompt_tokens: int = 0


def plugin_folder(folder: Path) -> Mapping[str, str]:
    """Make a folder from which vLLM loads the plugin; return the environment that engines need for it."""
    metadata = folder / "site" / "conserve_benchmark_probe-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: conserve-benchmark-probe\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nconserve_probe = {__name__}:install\n")
    (folder / EVENTS).mkdir()
    root = Path(__file__).parents[2]
    return {FOLDER: str(folder / EVENTS), "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{root}"}


def install() -> None:
    """Wrap the methods that do an engine's work. vLLM calls this in each of its processes.

    A spawned process is already constructing its core or worker then, so only methods that run later can be
    wrapped.
    """
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _before(EngineCoreProc, "run_busy_loop", _watch_core)
    _before(WorkerWrapperBase, "initialize_from_config", _watch_worker)


def _before(owner: type, name: str, first: Callable[[Any], None]) -> None:
    """Patch the class `owner` so that `first` is called with the object before its method `name`."""
    method = getattr(owner, name)

    @wraps(method)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self)
        return method(self, *args, **kwargs)

    setattr(owner, name, both)


def _watch_core(core: Any) -> None:
    time_calls(core.scheduler, "schedule", SCHEDULE, scheduled_tokens)
    time_calls(core.scheduler, "update_from_output", UPDATE)
    time_calls(core, "_process_input_queue", WAIT)


def _watch_worker(wrapper: Any) -> None:
    time_calls(wrapper.worker, "execute_model", MODEL)
    time_calls(wrapper.worker, "sample_tokens", SAMPLE)
    if wrapper.vllm_config.kv_transfer_config is not None:
        from kvtransfer.checkpoint.copier import Copier

        time_calls(Copier, "_store", STORE)
        time_calls(Copier, "_load", LOAD)


def scheduled_tokens(output: Any) -> dict[str, int]:
    tokens = output.num_scheduled_tokens.values()
    prompts = [one for one in tokens if one > 1]
    return {
        "decodes": len(tokens) - len(prompts),
        "prompts": len(prompts),
        "prompt_tokens": sum(prompts),
    }


def time_calls(
    owner: Any, name: str, kind: str, facts: Callable[[Any], dict[str, int]] | None = None
) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began, cpu = time.monotonic(), time.thread_time()
        result = method(*args, **kwargs)
        ended = time.monotonic()
        _write(kind, ended, ended - began, time.thread_time() - cpu, **(facts(result) if facts else {}))
        return result

    setattr(owner, name, timed)


def _write(kind: str, at: float, seconds: float, cpu_s: float, **more: int) -> None:
    line = json.dumps({"kind": kind, "at": at, "seconds": seconds, "cpu_s": cpu_s, **more}) + "\n"
    _file().write(line.encode())


open_files: dict[int, Any] = {}  # by process: a fork opens its own


def _file() -> Any:
    pid = os.getpid()
    if pid not in open_files:
        open_files[pid] = (Path(os.environ[FOLDER]) / f"{pid}.jsonl").open("ab", buffering=0)
    return open_files[pid]
