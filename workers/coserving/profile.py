"""Profiling: iterations of many shapes on a real engine, and the latency model that fits them."""

import asyncio
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.latency import Sample, error_by_region, fit
from placement.profiles import Profile
from workers.coserving.iterations import IterationRecord
from workers.coserving.standalone import CoServingEngine

CHECK_SHARE = 0.005  # of an iteration's time that checking the flag may cost


@dataclass(frozen=True, slots=True)
class Point:
    """An iteration to provoke: `rows` rows of `new` tokens, each on top of `context` tokens."""

    rows: int
    new: int
    context: int


@dataclass(frozen=True, slots=True)
class Grid:
    max_tokens: int  # of an iteration
    max_context: int
    max_rows: int
    block_tokens: int
    repeats: int = 3

    def points(self) -> Iterator[Point]:
        contexts = [0, *_powers(4 * self.block_tokens, self.max_context // 2)]
        for new, context in itertools.product(_powers(32, self.max_tokens), contexts):
            if new + context + 8 <= self.max_context:
                yield Point(1, new, context)
        for rows, context in itertools.product(_powers(1, self.max_rows), contexts[1:]):
            if rows * context <= 4 * self.max_tokens:  # more would take minutes to prepare
                yield Point(rows, 1, context)


def _powers(first: int, last: int) -> list[int]:
    """`first`, four times that and so on, and `last`."""
    values = []
    while first < last:
        values.append(first)
        first *= 4
    return [*values, last]


async def measure(engine: CoServingEngine, grid: Grid, seed: int = 0) -> list[Sample]:
    """Provokes every point, `repeats` times over."""
    rng = random.Random(seed)
    points = list(grid.points())
    await warm_up(engine, grid, rng)
    before = len(engine.iterations())
    for _ in range(grid.repeats):
        rng.shuffle(points)  # so that a slow minute of the machine does not look like a slow shape
        for point in points:
            await _provoke(engine, point, rng)
    return samples_of(engine.iterations()[before:], grid.repeats)


async def warm_up(engine: CoServingEngine, grid: Grid, rng: random.Random) -> None:
    """Every block of KV is used once: memory touched for the first time costs an iteration a third more.

    The first iterations also compile and allocate.
    """
    config = engine.llm.vllm_config.cache_config
    length = min(grid.max_tokens, grid.max_context - 8)
    for _ in range(-(-int(config.num_gpu_blocks or 0) * grid.block_tokens // length)):
        await _provoke(engine, Point(1, length, 0), rng)
    await _provoke(engine, Point(min(grid.max_rows, 16), 1, 4 * grid.block_tokens), rng)


def samples_of(records: list[IterationRecord], repeats: int) -> list[Sample]:
    """One sample a shape: of the iterations of much the same shape, that at the lower quartile of time.

    What disturbs an iteration (another process on its core) only ever adds to its time, so the lower quartile
    is nearer than the median to what the same work takes undisturbed. Shapes seen less often than points were
    repeated came about by accident: requests of one point that arrived in two iterations.
    """
    alike: dict[tuple[int, int, int], list[IterationRecord]] = defaultdict(list)
    for record in records:
        if not record.aborted:
            work = record.work
            alike[work.rows, _size(work.new_tokens), _size(work.context)].append(record)
    samples = []
    for shape in alike.values():
        if len(shape) >= repeats:
            shape.sort(key=lambda record: record.seconds)
            typical = shape[(len(shape) - 1) // 4]
            samples.append(Sample(typical.work, typical.seconds))
    return samples


def _size(tokens: int) -> int:
    """The same for numbers of tokens that differ by a few percent."""
    return round(math.log(max(tokens, 1)) / math.log(1.06))


async def _provoke(engine: CoServingEngine, point: Point, rng: random.Random) -> None:
    """The context is computed first and stays in the prefix cache; then the rows come together."""
    prompts = [[rng.randint(32, 120) for _ in range(point.context)] for _ in range(point.rows)]
    if point.context:
        await asyncio.gather(*(_ask(engine, prompt, 1) for prompt in prompts))
    tails = [[rng.randint(32, 120) for _ in range(point.new)] for _ in prompts]
    output = 4 if point.new == 1 else 1
    asked = (_ask(engine, prompt + tail, output) for prompt, tail in zip(prompts, tails, strict=True))
    await asyncio.gather(*asked)


async def _ask(engine: CoServingEngine, prompt: list[int], output: int) -> None:
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
    """Layers between two checks: the fewest for which checking costs no more than its share."""
    if layer_seconds <= 0:
        return 1
    return max(1, min(layers, math.ceil(check_seconds / (CHECK_SHARE * layer_seconds))))


def plot(profile: Profile, samples: list[Sample], path: Path) -> None:
    """Predicted against measured, one dot a shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [sample.seconds * 1e3 for sample in samples]
    predicted = [profile.model.seconds(sample.work) * 1e3 for sample in samples]
    figure, axis = pyplot.subplots(figsize=(5, 5))
    tokens: Any = [sample.work.new_tokens for sample in samples]
    dots = axis.scatter(measured, predicted, c=tokens, norm="log", s=18)
    ends = [min(measured) * 0.8, max(measured) * 1.25]
    axis.plot(ends, ends, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", xlim=ends, ylim=ends)
    figure.colorbar(dots, label="new tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
