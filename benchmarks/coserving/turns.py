"""Policies taking turns on one engine under one load, by a scheduler whose policy changes while it runs."""

import json
import os
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.coserving.load import Experienced, OnlineLoad, PartLengths, PolicyTurn
from benchmarks.harness.output import quantile
from deploy.small_model import ModelShape, make_model
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import CONSERVATIVE, LatencyModel, SelfCorrecting
from placement.scheduling.policy_registry import make_policy
from workers.coserving.config import SAFEPOINT_PLUGIN, CoServingConfig
from workers.coserving.iterations import IterationRecord
from workers.coserving.profile import (
    Grid,
    StandaloneEngine,
    StandaloneShape,
    coserving_engine,
    measure,
    profile_of,
    warm_up,
)
from workers.coserving.scheduler import CoServingScheduler
from workers.processes import write_atomically
from workers.profiles import Profile

SCHEDULER = "benchmarks.coserving.turns.SwitchingScheduler"
VARIABLE = "CONSERVE_BENCHMARK_POLICY"


def choose(path: Path, settings: ServingSettings, model: LatencyModel) -> None:
    """The file becomes another one, by which the scheduler sees it."""
    write_atomically(path, json.dumps({"settings": asdict(settings), "model": asdict(model)}))


class SwitchingScheduler(CoServingScheduler):
    """Reads its settings anew whenever the file named in the environment is replaced."""

    _chosen_at = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        path = os.environ[VARIABLE]
        changed = os.stat(path).st_ino
        if changed != self._chosen_at:
            self._chosen_at = changed
            chosen = json.loads(Path(path).read_text())
            values = chosen["settings"]
            settings = ServingSettings(**{**values, "slo": TurnTargets(**values["slo"])})
            # Each turn starts from the profile: none has what another's iterations have taught the model.
            self.policy = make_policy(settings)
            self.latency = SelfCorrecting(LatencyModel(**chosen["model"]))
            self.tracked.default_slo = settings.slo
        return super().schedule(throttle_prefills)


LAYERS = 24
MAX_CONTEXT = 2048
BLOCK = 32
BASELINE = "online_only"
LOOSE = TurnTargets(60.0, 10.0)


@dataclass
class LoadOutcome:
    load: OnlineLoad
    slo: TurnTargets  # the P99 of online work alone, in turns before
    by_policy: dict[str, Experienced]
    iterations: dict[str, list[IterationRecord]]


@dataclass
class TurnBench:
    engine: StandaloneEngine
    profile: Profile
    lengths: PartLengths
    chosen: Path  # the file that names the policy

    @property
    def model(self) -> LatencyModel:
        return self.profile.model

    async def turn(
        self, name: str, load: OnlineLoad, seed: int, slo: TurnTargets, into: Experienced
    ) -> list[IterationRecord]:
        choose(self.chosen, settings_of(name, slo, self.lengths), self.model)
        before = len(self.engine.iterations())
        turn = PolicyTurn(self.engine, load, seed, with_offline=not name.startswith(BASELINE))
        await turn.run(into)
        records = [r for r in self.engine.iterations()[before:] if r.at <= turn.until]
        into.offline_tokens += sum(r.offline_tokens - r.again_tokens for r in records if not r.aborted)
        return records

    async def capacity(self, seconds: float) -> float:
        """Requests a second, of the loads' lengths, when there is nothing but a batch of them."""
        load, got = OnlineLoad(1e-6, 1.0, seconds, self.lengths), Experienced()
        await self.turn("non_preemptive", load, 0, LOOSE, got)
        return got.throughput / (self.lengths.prompt + self.lengths.output)

    async def compare(self, load: OnlineLoad, policies: tuple[str, ...], turns: int) -> LoadOutcome:
        """Each turn every policy meets the same arrivals; the targets are from turns of the baseline before.

        Those turns decide nothing else: a policy is compared with as many requests of the baseline as it has
        itself, since a P99 of twice as many is another order statistic. The policies go forwards, then
        backwards, so that a drift of the machine meets all alike and neighbours stay neighbours.
        """
        names = (BASELINE, *(name for name in policies if name != BASELINE))
        alone = Experienced()
        for number in range(turns):
            await self.turn(BASELINE, load, number, LOOSE, alone)
        slo = TurnTargets(quantile(alone.ttft, 0.99), quantile(alone.tbt, 0.99))
        outcome = LoadOutcome(
            load, slo, {name: Experienced() for name in names}, {name: [] for name in names}
        )
        for number in range(turns):
            for name in names if number % 2 == 0 else names[::-1]:
                records = await self.turn(name, load, number, slo, outcome.by_policy[name])
                outcome.iterations[name] += records
        return outcome


def settings_of(name: str, slo: TurnTargets, lengths: PartLengths) -> ServingSettings:
    policy, _, without = name.partition(" without ")
    return ServingSettings(policy, slo, safepoints=without != "safepoints")


def threads() -> dict[str, str]:
    """One core is left for vLLM's other processes, which spin while the model runs, and for the clients."""
    count = max(1, (os.cpu_count() or 2) - 1)
    return {"OMP_NUM_THREADS": str(count), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@asynccontextmanager
async def bench(
    model: Path | None, lengths: PartLengths, repeats: int, blocks: int, host_kv_gib: float = 0.0,
    profile: Profile | None = None,
) -> AsyncIterator[TurnBench]:  # fmt: skip
    """An engine, profiled first where there is no profile. Without a model one of 24 layers is made."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder) / "model"
            make_model(model, ModelShape(layers=LAYERS))
        chosen = Path(folder) / "policy.json"
        choose(chosen, ServingSettings("non_preemptive"), CONSERVATIVE)
        shape = StandaloneShape(
            model, blocks=blocks, max_tokens=lengths.iteration, max_running=64, max_context=MAX_CONTEXT,
            block_tokens=BLOCK, scheduler=SCHEDULER, plugins=(SAFEPOINT_PLUGIN,),
            host_kv_gib=host_kv_gib, environment={VARIABLE: str(chosen), **threads()},
        )  # fmt: skip
        async with coserving_engine(shape, CoServingConfig()) as engine:
            grid = Grid(lengths.iteration, MAX_CONTEXT, 32, BLOCK, repeats)
            if profile is None:
                profile = profile_of(await measure(engine, grid), LAYERS, 0.0)
            else:
                await warm_up(engine, grid, random.Random(0))
            yield TurnBench(engine, profile, lengths, chosen)
