"""Policies taking turns on one engine under one load."""

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import coserving_switch as switch
from benchmarks.coserving_load import Experienced, Lengths, Load, Turn, quantile
from deploy.model.make import make_model
from deploy.model.shape import ModelShape
from placement.latency import CONSERVATIVE, LatencyModel
from placement.profiles import Profile
from placement.serving import ServingSettings
from placement.serving.state import Slo
from workers.coserving.config import SAFEPOINT_PART, CoServingConfig
from workers.coserving.iterations import IterationRecord
from workers.coserving.profile import Grid, measure, profile_of
from workers.coserving.standalone import CoServingEngine, EngineShape, coserving_engine

LAYERS = 24
MAX_CONTEXT = 2048
BLOCK = 32
BASELINE = "online_only"
LOOSE = Slo(60.0, 10.0)


@dataclass
class Outcome:
    load: Load
    slo: Slo  # promised: the P99 of online work alone, in turns before
    by_policy: dict[str, Experienced]
    iterations: dict[str, list[IterationRecord]]


@dataclass
class Bench:
    engine: CoServingEngine
    profile: Profile
    lengths: Lengths
    _chosen: Path

    @property
    def model(self) -> LatencyModel:
        return self.profile.model

    async def turn(
        self, name: str, load: Load, seed: int, slo: Slo, into: Experienced
    ) -> list[IterationRecord]:
        switch.choose(self._chosen, settings_of(name, slo, self.lengths), self.model)
        before = len(self.engine.iterations())
        turn = Turn(self.engine, load, seed, with_offline=not name.startswith(BASELINE))
        await turn.run(into)
        records = [r for r in self.engine.iterations()[before:] if r.at <= turn.until]
        into.offline_tokens += sum(r.offline_tokens - r.again_tokens for r in records if not r.aborted)
        return records

    async def capacity(self, seconds: float) -> float:
        """Requests a second, of the loads' lengths, when there is nothing but a batch of them."""
        load, got = Load(1e-6, 1.0, seconds, self.lengths), Experienced()
        await self.turn("non_preemptive", load, 0, LOOSE, got)
        return got.throughput / (self.lengths.prompt + self.lengths.output)

    async def compare(self, load: Load, policies: tuple[str, ...], turns: int) -> Outcome:
        """Each turn every policy meets the same arrivals; the promise is from turns of the baseline before.

        Those turns decide nothing else: a policy is compared with as many requests of the baseline as it has
        itself, since a P99 of twice as many is another order statistic. The policies go forwards, then
        backwards, so that a drift of the machine meets all alike and neighbours stay neighbours.
        """
        names = (BASELINE, *(name for name in policies if name != BASELINE))
        alone = Experienced()
        for number in range(turns):
            await self.turn(BASELINE, load, number, LOOSE, alone)
        slo = Slo(quantile(alone.ttft, 0.99), quantile(alone.tbt, 0.99))
        outcome = Outcome(load, slo, {name: Experienced() for name in names}, {name: [] for name in names})
        for number in range(turns):
            for name in names if number % 2 == 0 else names[::-1]:
                records = await self.turn(name, load, number, slo, outcome.by_policy[name])
                outcome.iterations[name] += records
        return outcome


def settings_of(name: str, slo: Slo, lengths: Lengths) -> ServingSettings:
    policy, _, without = name.partition(" without ")
    return ServingSettings(policy, slo, safepoints=without != "safepoints", chunk_tokens=lengths.iteration)


def threads() -> dict[str, str]:
    """One core is left for vLLM's other processes, which spin while the model runs, and for the clients."""
    count = max(1, (os.cpu_count() or 2) - 1)
    return {"OMP_NUM_THREADS": str(count), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@asynccontextmanager
async def bench(
    model: Path | None, lengths: Lengths, repeats: int, blocks: int, host_kv_gib: float = 0.0
) -> AsyncIterator[Bench]:
    """An engine that was just profiled. Without a model one of 24 layers is made."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder) / "model"
            make_model(model, ModelShape(layers=LAYERS))
        chosen = Path(folder) / "policy.json"
        switch.choose(chosen, ServingSettings("non_preemptive"), CONSERVATIVE)
        shape = EngineShape(
            model, blocks=blocks, max_tokens=lengths.iteration, max_running=64, max_context=MAX_CONTEXT,
            block_tokens=BLOCK, scheduler=switch.SCHEDULER, parts=(SAFEPOINT_PART,),
            host_kv_gib=host_kv_gib, environment={switch.VARIABLE: str(chosen), **threads()},
        )  # fmt: skip
        async with coserving_engine(shape, CoServingConfig()) as engine:
            samples = await measure(engine, Grid(lengths.iteration, MAX_CONTEXT, 32, BLOCK, repeats))
            yield Bench(engine, profile_of(samples, LAYERS, 0.0), lengths, chosen)
