"""Measurement of an engine's iterations, from which the latency model is fitted (`conserve profile`).

The engine runs in this process, without HTTP and without a fleet.
"""

import asyncio
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtransfer.config import ConnectorConfig
from placement.scheduling.latency_model import Sample, error_by_region, fit
from workers.engine.coserving.config import CoServingConfig
from workers.engine.coserving.iterations import IterationRecord, read_iterations
from workers.keeper.launch import FLEET_MARK, EngineKeys, LaunchSpec, Start, engine_command
from workers.profiles import Profile


@dataclass
class LoggedEngine:
    """Running engine with its iteration log."""

    llm: Any  # vLLM's AsyncLLM
    log: Path

    def iterations(self) -> list[IterationRecord]:
        return read_iterations(self.log)


@asynccontextmanager
async def launched_engine(spec: LaunchSpec) -> AsyncIterator[LoggedEngine]:
    """Run the engine that a keeper would launch, but without HTTP, peers and KV on the host.

    vLLM's own rules schedule it, so that an iteration has exactly the requests that are sent for it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        log = Path(folder) / "iterations.jsonl"
        config = CoServingConfig.from_additional_config(json.loads(spec.additional or "{}"))
        alone = replace(
            spec,
            directory=Path(folder),
            connector=replace(spec.connector or ConnectorConfig(), transfer=False, host_kv_gib=0.0),
            additional=json.dumps(
                replace(config, planned=False, iteration_log=str(log)).to_additional_config()
            ),
        )
        command = engine_command(alone, Start(1, 0, 0), EngineKeys(), os.environ)
        # Leave out the fleet's mark, so that the engine does not end when a running fleet ends.
        os.environ.update({name: value for name, value in command.env.items() if name != FLEET_MARK})
        given = make_arg_parser(FlexibleArgumentParser()).parse_args(list(command.argv[3:]))
        arguments = AsyncEngineArgs.from_cli_args(given)
        arguments.disable_log_stats = True
        # Use the defaults of vLLM's server, which differ from those of vLLM as a library.
        llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        try:
            yield LoggedEngine(llm, log)
        finally:
            llm.shutdown()


CHECK_SHARE = 0.005  # share of an iteration's time that checking the flag may cost


@dataclass(frozen=True, slots=True)
class Point:
    """Shape of an iteration to measure: `requests` requests with `new` tokens after `context` tokens."""

    requests: int
    new: int
    context: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranges of the shapes to measure."""

    max_tokens: int  # most tokens of an iteration
    max_context: int
    max_requests: int
    block_tokens: int
    repeats: int = 3

    def points(self) -> Iterator[Point]:
        contexts = [0, *_powers(4 * self.block_tokens, self.max_context // 2)]
        for new, context in itertools.product(_powers(32, self.max_tokens), contexts):
            if new + context + 8 <= self.max_context:
                yield Point(1, new, context)
        for requests, context in itertools.product(_powers(1, self.max_requests), contexts[1:]):
            if requests * context <= 4 * self.max_tokens:  # more takes minutes to prepare
                yield Point(requests, 1, context)


def _powers(first: int, last: int) -> list[int]:
    """Return `first` and its multiples by powers of four below `last`, and then `last`."""
    values = []
    while first < last:
        values.append(first)
        first *= 4
    return [*values, last]


def grid_of(engine: LoggedEngine, repeats: int) -> Grid:
    """Return the ranges of shapes that the engine accepts."""
    config = engine.llm.vllm_config
    most = int(config.scheduler_config.max_num_batched_tokens)
    longest = min(int(config.model_config.max_model_len), 4 * most)
    requests, block = int(config.scheduler_config.max_num_seqs), int(config.cache_config.block_size)
    return Grid(most, longest, requests, block, repeats)


async def measure(engine: LoggedEngine, grid: Grid, seed: int = 0) -> list[Sample]:
    """Run every point of the grid `grid.repeats` times, and return the samples."""
    rng = random.Random(seed)
    points = list(grid.points())
    await warm_up(engine, grid, rng)
    before = len(engine.iterations())
    for _ in range(grid.repeats):
        rng.shuffle(points)  # so that a slow minute of the machine affects all shapes alike
        for point in points:
            await _provoke(engine, point, rng)
    return samples_of(engine.iterations()[before:], grid.repeats)


async def warm_up(engine: LoggedEngine, grid: Grid, rng: random.Random) -> None:
    """Use every KV block once, because an iteration on untouched memory takes a third longer.

    The first iterations also compile and allocate.
    """
    config = engine.llm.vllm_config.cache_config
    length = min(grid.max_tokens, grid.max_context - 8)
    for _ in range(-(-int(config.num_gpu_blocks or 0) * grid.block_tokens // length)):
        await _provoke(engine, Point(1, length, 0), rng)
    await _provoke(engine, Point(min(grid.max_requests, 16), 1, 4 * grid.block_tokens), rng)


def samples_of(records: list[IterationRecord], repeats: int) -> list[Sample]:
    """Return one sample per shape: the lower quartile of iterations of similar shape.

    Disturbances, such as another process on the core, only add to an iteration's time. So the lower quartile
    is nearer to the undisturbed time than the median. A shape that occurs less often than `repeats` is left
    out: it arose by chance, when the requests of one point were computed in two iterations.
    """
    alike: dict[tuple[int, int, int], list[IterationRecord]] = defaultdict(list)
    for record in records:
        if not record.aborted:
            work = record.work
            alike[work.requests, _size(work.new_tokens), _size(work.context)].append(record)
    samples = []
    for shape in alike.values():
        if len(shape) >= repeats:
            shape.sort(key=lambda record: record.seconds)
            typical = shape[(len(shape) - 1) // 4]
            samples.append(Sample(typical.work, typical.seconds))
    return samples


def _size(tokens: int) -> int:
    """Return a number that is equal for token counts within a few percent of each other."""
    return round(math.log(max(tokens, 1)) / math.log(1.06))


async def _provoke(engine: LoggedEngine, point: Point, rng: random.Random) -> None:
    """Run one point: compute the context, which stays in the prefix cache, and send the requests together."""
    prompts = [[rng.randint(32, 120) for _ in range(point.context)] for _ in range(point.requests)]
    if point.context:
        await asyncio.gather(*(_ask(engine, prompt, 1) for prompt in prompts))
    tails = [[rng.randint(32, 120) for _ in range(point.new)] for _ in prompts]
    output = 4 if point.new == 1 else 1
    asked = (_ask(engine, prompt + tail, output) for prompt, tail in zip(prompts, tails, strict=True))
    await asyncio.gather(*asked)


async def _ask(engine: LoggedEngine, prompt: list[int], output: int) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    name = f"profile-{time.monotonic_ns()}-{id(prompt)}"
    async for _ in engine.llm.generate({"prompt_token_ids": prompt}, params, name):
        pass


def profile_of(samples: list[Sample], layers: int, now: float) -> Profile:
    model = fit(samples)
    largest = max(samples, key=lambda sample: sample.seconds)
    return Profile(model, error_by_region(model, samples), largest.seconds / layers, now)


def safepoint_every(layer_seconds: float, check_seconds: float, layers: int) -> int:
    """Return the fewest layers from one check for an abort to the next that keep to `CHECK_SHARE`."""
    if layer_seconds <= 0:
        return 1
    return max(1, min(layers, math.ceil(check_seconds / (CHECK_SHARE * layer_seconds))))
