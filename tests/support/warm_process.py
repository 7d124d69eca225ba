"""Processes that have imported vLLM already, because they are forks of a process that imported it once.

The import of vLLM takes two thirds of an engine's start. Fleets, and tests of the start itself, run the
product's own command instead.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from tests.support import engine_device
from workers.engine.compat.cpu_build import fork_engine_on_cpu

Result = TypeVar("Result")
IMPORTED = ["vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.core"]


def warm_context() -> ForkServerContext:
    """Return the multiprocessing context whose processes have imported vLLM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(
        os.environ, engine_device.environment()
    ):  # torch reads its variables when it is imported
        forkserver.ensure_running()
    return context


def call_warm(function: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function in a process that has imported vLLM and forks its engines; return the result."""
    with ProcessPoolExecutor(1, warm_context(), fork_engine_on_cpu) as process:
        return process.submit(function, *arguments).result()


def start_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ForkServerProcess:
    """Run `python -m MODULE ARGUMENTS` in a new session, with its output in `log`."""
    process = warm_context().Process(target=_run_module, args=(module, arguments, environment, log))
    process.start()
    return process


def _run_module(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
