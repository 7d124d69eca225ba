"""Engines that share a large GPU: all start first, then their loads are played in turns and in rounds.

An engine that waits for its turn uses neither the GPU nor a core. Rounds put the machine's drift into the
figures of all engines alike, and starts of a minute each overlap.
"""

import asyncio
import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import loads
from benchmarks.gpu.loads import Load
from benchmarks.gpu.results import ResultLog
from benchmarks.gpu.runner import end_tree

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
    """One engine in a process of its own, which plays the loads that it is told."""

    def __init__(self, name: str, device: str, out: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self._log = ResultLog(out, name)
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(name, device, out, theirs))
        self._process.start()
        theirs.close()
        self._ended = ""

    def answer(self, limit_s: float) -> None:
        """Wait for the engine's next word, and log what went wrong. A silent engine is asked no more."""
        if self._ended:
            return
        try:
            if not self._connection.poll(limit_s):
                self._ended = f"no answer within {limit_s:.0f} s"
            elif (word := self._connection.recv()) != DONE:
                self._log.add({"outcome": word})
        except (EOFError, OSError) as error:
            self._ended = f"its process ended: {type(error).__name__}"
        if self._ended:
            self._log.add({"outcome": self._ended})

    def play(self, load: str, repeat: int | None = None) -> None:
        if not self._ended:
            self._connection.send((load, repeat))
            self.answer(LOAD_LIMIT_S)

    def end(self) -> None:
        if not self._ended:
            self._connection.send(None)
            self._process.join(20)
        if self._process.is_alive():
            end_tree(self._process.pid or 0)


def serve(name: str, device: str, out: Path, connection: Connection) -> None:
    """Start an engine, and play loads until told to end."""
    asyncio.run(_serve(name, device, ResultLog(out, name), connection))


async def _serve(name: str, device: str, log: ResultLog, connection: Connection) -> None:
    import tempfile

    from benchmarks.gpu.engines import VARIANTS, RunFolder, started
    from benchmarks.gpu.sizes import LARGE, SMALL
    from benchmarks.gpu.step_clock import graph_modes

    sizes = LARGE if device == "cuda" else SMALL
    variant = VARIANTS[name]
    if device == "cuda":
        variant = replace(variant, options={**variant.options, **SHARES})
    with tempfile.TemporaryDirectory() as folder:
        async with started(name, variant, RunFolder(Path(folder), sizes), device, log) as engine:
            for count in sizes.batches:  # kernels that are compiled at their first use
                await engine.answers(count, 24, 7_000 * count)
            connection.send(DONE)
            while (told := await asyncio.to_thread(connection.recv)) is not None:
                load, repeat = told
                try:
                    played: Load = getattr(loads, load)
                    log.add(await played(engine), repeat)
                    modes = graph_modes(engine.clock)
                    log.add({f"graphs_{mode}": count for mode, count in modes.items()})
                    connection.send(DONE)
                except Exception as error:  # noqa: BLE001  the other loads are worth having; the log says so
                    connection.send(f"{load}: {type(error).__name__}: {error}"[:500])


def measure_together(device: str, out: Path, names: tuple[str, ...] = ENGINES) -> None:
    """Start all engines, then play the repeated load in rounds and the others once."""
    engines = [EngineInTurn(name, device, out) for name in names]
    try:
        for engine in engines:
            engine.answer(START_LIMIT_S)
        for repeat in range(ROUNDS):
            for engine in engines:
                engine.play("time_between_tokens", repeat)
        for load, asked in ONCE:
            for engine in engines:
                if engine.name in asked:
                    engine.play(load)
    finally:
        for engine in engines:
            engine.end()
