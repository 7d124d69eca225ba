"""Engines that share a large GPU: all start first, then one at a time plays its loads, in rounds.

An engine that waits uses neither the GPU nor a core. Rounds spread the machine's drift over all engines, and
the starts, which take a minute each, overlap.
"""

import asyncio
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import loads
from benchmarks.gpu.loads import Load
from benchmarks.gpu.results import ResultLog
from benchmarks.harness.processes import received, spawned

ENGINES = ("coserving", "plain", "plain-v2", "kept")
ROUNDS = 3
DONE = "done"
START_LIMIT_S, LOAD_LIMIT_S = 240.0, 90.0
SHARES: dict[str, Any] = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 << 30}
ONCE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("time_to_first_token", ENGINES),
    ("beside_offline_decodes", ("coserving", "plain")),
    ("turns_beside_offline_work", ("coserving",)),
    ("back_from_the_host", ("kept",)),
    ("answers_beside_aborts", ("coserving",)),
    ("paper_load", ("coserving", "plain")),
)


class EngineInTurn:
    """One engine in its own process, which plays the requested loads."""

    def __init__(self, name: str, pipe: Connection, out: Path) -> None:
        self.name, self._pipe, self._log = name, pipe, ResultLog(out, name)
        self._lost = False

    def play(self, load: str, repeat: int | None = None) -> None:
        if not self._lost:
            self._pipe.send((load, repeat))
            self.wait(LOAD_LIMIT_S)

    def wait(self, limit_s: float) -> None:
        """Wait until the engine has started or played a load, and log errors. A lost engine plays no more."""
        try:
            if (outcome := received(self._pipe, limit_s)) != DONE:
                self._log.add({"outcome": outcome})
        except (EOFError, OSError) as error:  # a TimeoutError is an OSError
            self._lost = True
            self._log.add({"outcome": f"{type(error).__name__}: {error}"})


def serve(pipe: Connection, name: str, device: str, out: Path) -> None:
    """Start an engine, and play loads until the pipe is closed."""
    asyncio.run(_serve(pipe, name, device, ResultLog(out, name)))


async def _serve(pipe: Connection, name: str, device: str, log: ResultLog) -> None:
    from benchmarks.gpu.engines import VARIANTS, RunFolder, started
    from benchmarks.gpu.step_clock import graph_modes

    variant = VARIANTS[name]
    if device == "cuda":
        variant = replace(variant, options={**variant.options, **SHARES})
    with tempfile.TemporaryDirectory() as folder:
        made = RunFolder(Path(folder), device)
        async with started(name, variant, made, log) as engine:
            for count in made.sizes.batches:  # kernels that are compiled at their first use
                await engine.answers(count, 24, 7_000 * count)
            pipe.send(DONE)
            while True:
                try:
                    load, repeat = await asyncio.to_thread(pipe.recv)
                except EOFError:
                    return
                try:
                    played: Load = getattr(loads, load)
                    log.add(await played(engine), repeat)
                    log.add(graph_modes(engine.clock))
                    pipe.send(DONE)
                except Exception as error:  # noqa: BLE001  logged; the other loads are still measured
                    pipe.send(f"{load}: {type(error).__name__}: {error}"[:500])


def measure_together(device: str, out: Path, names: tuple[str, ...] = ENGINES) -> None:
    """Start all engines, then run the repeated load on them in rounds, and each other load once."""
    with ExitStack() as stack:
        pipes = {name: stack.enter_context(spawned(serve, name, device, out)) for name in names}
        engines = [EngineInTurn(name, pipe, out) for name, pipe in pipes.items()]
        for engine in engines:
            engine.wait(START_LIMIT_S)
        for repeat in range(ROUNDS):
            for engine in engines:
                engine.play("time_between_tokens", repeat)
        for load, asked in ONCE:
            for engine in engines:
                if engine.name in asked:
                    engine.play(load)
