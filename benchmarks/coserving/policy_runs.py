"""Policies that alternate on one engine under the same online arrivals, beside continuous offline work.

The scheduler reads its policy from a file, and so changes it while the engine runs.
"""

import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.output import quantile
from benchmarks.harness.rounds import forth_and_back
from benchmarks.harness.standalone_engine import StandaloneEngine, StandaloneShape, coserving_engine
from deploy.small_model import ModelShape, make_model
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import CONSERVATIVE, LatencyModel, SelfCorrecting
from placement.scheduling.policy_registry import make_policy
from workers.engine.coserving.config import CoServingConfig
from workers.engine.coserving.iterations import IterationRecord
from workers.engine.coserving.profile import Grid, measure, profile_of
from workers.engine.coserving.scheduler import CoServingScheduler
from workers.processes import write_atomically
from workers.profiles import Profile

SCHEDULER = "benchmarks.coserving.policy_runs.SwitchingScheduler"
POLICY_FILE = "CONSERVE_BENCHMARK_POLICY"
LAYERS, MAX_CONTEXT, BLOCK = 24, 2048, 32
BASELINE = "online_only"
LOOSE = TurnTargets(60.0, 10.0)
END_LIMIT_S = 120.0


@dataclass(frozen=True)
class PartLengths:
    """Lengths of a prompt and of an answer, and the token budget of an iteration."""

    prompt: int
    output: int
    iteration: int

    @staticmethod
    def part_of_paper(part: int) -> "PartLengths":
        """Return a fraction of the paper's lengths: 4,096 in, 256 out, 2,048 an iteration."""
        return PartLengths(4096 // part, 256 // part, 2048 // part)

    @property
    def offline_at_once(self) -> int:
        """Return how many offline requests it takes to fill every iteration.

        Decoding one answer takes `output` iterations, in which the prompts of other requests are computed.
        """
        return self.output * self.iteration // self.prompt + 4


@dataclass(frozen=True)
class OnlineLoad:
    """Online requests that arrive with gamma-distributed gaps."""

    rate: float  # requests a second
    cv: float  # coefficient of variation of the gaps
    seconds: float
    lengths: PartLengths  # of online and offline requests
    share: float = 0.0  # the rate as a share of the engine's capacity

    def gaps(self, seed: int) -> Iterator[float]:
        rng, shape = random.Random(seed), 1 / (self.cv * self.cv)
        while True:
            yield rng.gammavariate(shape, 1 / (self.rate * shape))


@dataclass
class Experienced:
    """Measurements of one policy under one load, over all its runs."""

    ttft: list[float] = field(default_factory=list)
    tbt: list[float] = field(default_factory=list)
    offline_tokens: int = 0  # offline tokens computed for the first time
    seconds: float = 0.0

    @property
    def throughput(self) -> float:
        return self.offline_tokens / self.seconds if self.seconds else 0.0

    def attainment(self, ttft_s: float, tbt_s: float) -> float:
        """Return the lower of two shares: first tokens within `ttft_s`, and gaps within `tbt_s`."""
        if not self.ttft or not self.tbt:
            return 0.0
        first = sum(ttft <= ttft_s for ttft in self.ttft) / len(self.ttft)
        return min(first, sum(gap <= tbt_s for gap in self.tbt) / len(self.tbt))


class SwitchingScheduler(CoServingScheduler):
    """Scheduler that rereads its settings whenever the policy file is replaced."""

    _chosen_at = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        path = os.environ[POLICY_FILE]
        changed = os.stat(path).st_ino
        if changed != self._chosen_at:
            self._chosen_at = changed
            chosen = json.loads(Path(path).read_text())
            values = chosen["settings"]
            settings = ServingSettings(**{**values, "slo": TurnTargets(**values["slo"])})
            # Each policy starts from the profile, not from what another policy's iterations taught the model.
            self.policy = make_policy(settings)
            self.latency = SelfCorrecting(LatencyModel(**chosen["model"]))
            self.tracked.default_slo = settings.slo
        return super().schedule(throttle_prefills)


class PolicyRun:
    """One run of one policy: online requests arrive for `seconds`, then the engine is emptied."""

    def __init__(self, engine: StandaloneEngine, load: OnlineLoad, seed: int) -> None:
        self._engine, self._load, self._seed = engine, load, seed
        self._rng, self._ids = random.Random(seed), itertools.count()
        self.until = 0.0

    async def run(self, into: Experienced, with_offline: bool) -> None:
        load, began = self._load, time.monotonic()
        self.until = until = began + load.seconds
        count = load.lengths.offline_at_once if with_offline else 0
        offline = [asyncio.create_task(self._offline()) for _ in range(count)]
        online = []
        for gap in load.gaps(self._seed):
            if time.monotonic() + gap >= until:
                break
            await asyncio.sleep(gap)
            online.append(asyncio.create_task(self._online(into)))
        await asyncio.sleep(max(until - time.monotonic(), 0))
        into.seconds += time.monotonic() - began
        for task in offline:
            task.cancel()
        await asyncio.gather(*offline, return_exceptions=True)
        await asyncio.wait_for(asyncio.gather(*online), END_LIMIT_S)
        await self._engine.empty()

    async def _online(self, into: Experienced) -> None:
        asked = time.monotonic()
        times = [time.monotonic() async for _ in self._stream(0)]
        first, *later = (after - before for before, after in itertools.pairwise([asked, *times]))
        into.ttft.append(first)
        into.tbt += later

    async def _offline(self) -> None:
        while True:
            async for _ in self._stream(1):
                pass

    def _stream(self, priority: int) -> AsyncIterator[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        lengths, delta = self._load.lengths, RequestOutputKind.DELTA
        params = SamplingParams(
            temperature=0.0, max_tokens=lengths.output, ignore_eos=True, output_kind=delta
        )
        tokens = [self._rng.randint(32, 120) for _ in range(lengths.prompt)]
        name = f"{self._seed}-{priority}-{next(self._ids)}-{time.monotonic_ns()}"
        generated: AsyncIterator[Any] = self._engine.llm.generate(
            {"prompt_token_ids": tokens}, params, name, priority=priority
        )
        return generated


@dataclass
class LoadOutcome:
    """Measurements of all policies under one load, and the SLO targets that they had."""

    load: OnlineLoad
    slo: TurnTargets
    by_policy: dict[str, Experienced]
    iterations: dict[str, list[IterationRecord]]


@dataclass
class PolicyBench:
    """A profiled engine whose policy can be switched."""

    engine: StandaloneEngine
    profile: Profile
    lengths: PartLengths
    policy_file: Path

    async def serve(
        self, policy: str, load: OnlineLoad, seed: int, slo: TurnTargets, into: Experienced
    ) -> list[IterationRecord]:
        """Serve a load once with a policy, add the measurements to `into`, and return the iterations."""
        choose(self.policy_file, ServingSettings(policy, slo), self.profile.model)
        before = len(self.engine.iterations())
        run = PolicyRun(self.engine, load, seed)
        await run.run(into, with_offline=policy != BASELINE)
        records = [r for r in self.engine.iterations()[before:] if r.at <= run.until]
        into.offline_tokens += sum(r.offline_tokens - r.again_tokens for r in records if not r.aborted)
        return records

    async def capacity(self, seconds: float) -> float:
        """Return how many requests per second the engine serves if all work is offline."""
        load, got = OnlineLoad(1e-6, 1.0, seconds, self.lengths), Experienced()
        await self.serve("non_preemptive", load, 0, LOOSE, got)
        return got.throughput / (self.lengths.prompt + self.lengths.output)

    async def compare(self, load: OnlineLoad, policies: tuple[str, ...], runs: int) -> LoadOutcome:
        """Let every policy serve the same arrivals, `runs` times.

        The targets are the baseline's P99 in earlier runs, whose results are not compared. All policies have
        the same number of requests, because a P99 depends on their number.
        """
        names = (BASELINE, *(name for name in policies if name != BASELINE))
        alone = Experienced()
        for number in range(runs):
            await self.serve(BASELINE, load, number, LOOSE, alone)
        slo = TurnTargets(quantile(alone.ttft, 0.99), quantile(alone.tbt, 0.99))
        found = LoadOutcome(load, slo, {name: Experienced() for name in names}, {name: [] for name in names})
        for number in range(runs):
            for name in forth_and_back(names, number):
                found.iterations[name] += await self.serve(name, load, number, slo, found.by_policy[name])
        return found


def choose(file: Path, settings: ServingSettings, model: LatencyModel) -> None:
    write_atomically(file, json.dumps({"settings": asdict(settings), "model": asdict(model)}))


@asynccontextmanager
async def bench(model: Path | None, lengths: PartLengths, repeats: int) -> AsyncIterator[PolicyBench]:
    """Run a profiled engine whose KV holds the tokens of 112 iterations. Without `model`, make a model."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder) / "model"
            make_model(model, ModelShape(layers=LAYERS))
        policy_file = Path(folder) / "policy.json"
        choose(policy_file, ServingSettings("non_preemptive"), CONSERVATIVE)
        # One core is left for vLLM's other processes, which spin while the model runs, and for clients.
        threads = str(max(1, (os.cpu_count() or 2) - 1))
        environment = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        shape = StandaloneShape(
            model,
            blocks=112 * lengths.iteration // BLOCK,
            max_tokens=lengths.iteration,
            max_running=64,
            max_context=MAX_CONTEXT,
            block_tokens=BLOCK,
            scheduler=SCHEDULER,
            environment={POLICY_FILE: str(policy_file), **environment},
        )
        async with coserving_engine(shape, CoServingConfig()) as engine:
            grid = Grid(lengths.iteration, MAX_CONTEXT, 32, BLOCK, repeats)
            profile = profile_of(await measure(engine, grid), LAYERS, 0.0)
            yield PolicyBench(engine, profile, lengths, policy_file)
