"""Online arrivals from a gamma process beside offline work that never runs out, and what both experienced."""

import asyncio
import contextlib
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.coserving.profile import StandaloneEngine


@dataclass(frozen=True)
class PartLengths:
    """Of requests and iterations, in tokens."""

    prompt: int
    output: int
    iteration: int  # the most that one computes

    @staticmethod
    def part_of_paper(part: int) -> "PartLengths":
        """The paper has 4,096 in, 256 out and 2,048 an iteration, on a GPU: a part of each, alike."""
        return PartLengths(4096 // part, 256 // part, 2048 // part)

    @property
    def at_once(self) -> int:
        """So many offline requests that every iteration is full of them, and one waits.

        While one decodes, as many others have their prompts computed as fit that many iterations.
        """
        return self.output * self.iteration // self.prompt + 4


@dataclass(frozen=True)
class OnlineLoad:
    rate: float  # online requests a second
    cv: float  # coefficient of variation of the gaps between them
    seconds: float
    lengths: PartLengths  # of online and offline requests alike
    share: float = 0.0  # the rate, of what the engine can do


@dataclass
class Experienced:
    """Of one policy under one load; several turns add up."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)  # between tokens, by request
    offline_tokens: int = 0  # computed; work done again does not count
    seconds: float = 0.0

    @property
    def tbt(self) -> list[float]:
        return list(itertools.chain.from_iterable(self.gaps))

    @property
    def throughput(self) -> float:
        return self.offline_tokens / self.seconds if self.seconds else 0.0

    def attainment(self, ttft_s: float, tbt_s: float) -> float:
        """Share of first tokens, or of gaps, that were in time: whichever is less."""
        if not self.ttft or not self.tbt:
            return 0.0
        first = sum(ttft <= ttft_s for ttft in self.ttft) / len(self.ttft)
        later = sum(gap <= tbt_s for gap in self.tbt) / len(self.tbt)
        return min(first, later)


def gamma_gaps(rate: float, cv: float, seed: int) -> "itertools.chain[float]":
    rng = random.Random(seed)
    shape = 1 / (cv * cv)
    return itertools.chain.from_iterable(
        [rng.gammavariate(shape, 1 / (rate * shape))] for _ in itertools.count()
    )


class PolicyTurn:
    """One policy's turn: `seconds` of load on the engine, then nothing is left of it."""

    def __init__(self, engine: "StandaloneEngine", load: OnlineLoad, seed: int, with_offline: bool) -> None:
        self._engine = engine
        self._load = load
        self._seed = seed
        self._with_offline = with_offline
        self._ids = itertools.count()
        self._rng = random.Random(seed)
        self.until = 0.0

    async def run(self, into: Experienced) -> None:
        load, started = self._load, time.monotonic()
        until = self.until = started + load.seconds
        offline = [
            asyncio.create_task(self._offline_stream())
            for _ in range(load.lengths.at_once if self._with_offline else 0)
        ]
        online: list[asyncio.Task[None]] = []
        for gap in gamma_gaps(load.rate, load.cv, self._seed):
            now = time.monotonic()
            if now + gap >= until:
                break
            await asyncio.sleep(gap)
            online.append(asyncio.create_task(self._online(into)))
        await asyncio.sleep(max(until - time.monotonic(), 0))
        into.seconds += time.monotonic() - started
        for task in offline:
            task.cancel()
        await asyncio.gather(*offline, return_exceptions=True)
        await asyncio.wait_for(asyncio.gather(*online), 120)
        await self._engine.empty()

    async def _online(self, into: Experienced) -> None:
        asked = last = time.monotonic()
        ttft, gaps = 0.0, []
        async for _ in self._stream(0):
            now = time.monotonic()
            if ttft:
                gaps.append(now - last)
            else:
                ttft = now - asked
            last = now
        into.ttft.append(ttft)
        into.gaps.append(gaps)

    async def _offline_stream(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                async for _ in self._stream(1):
                    pass

    def _stream(self, priority: int):  # type: ignore[no-untyped-def]
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        lengths = self._load.lengths
        return self._engine.llm.generate(
            {"prompt_token_ids": [self._rng.randint(32, 120) for _ in range(lengths.prompt)]},
            SamplingParams(
                temperature=0.0,
                max_tokens=lengths.output,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            ),
            f"{self._seed}-{priority}-{next(self._ids)}-{time.monotonic_ns()}",
            priority=priority,
        )
