"""BROS at its own mixes on real vLLM: its policy beside others, and what slots of blocks could gain at most.

    python -m benchmarks.coserving.slots [--quick] [--rounds 2] [--seconds 40] [--blocks 192]
        [--target-scale 3] [--json FILE]

BROS shares a block between an online and an offline request: one takes the slots that the other leaves free,
then overwrites as many as it needs, and what it overwrites is on the host. ConServe has whole blocks, on the
host and found again by their hashes. Three engines, one after another, differ in memory alone:

* `whole`: whole blocks with the checkpoint on the host;
* `slots, bound`: the same, and more blocks: as many as the free slots of the last blocks of all requests that
  have KV at once could make if each but one slot of every such block were free. Sharing slots gives at most
  that, and its kernels, which take time, are not in it;
* `computed again`: whole blocks without the host, what the paper compares with.

On the first, first come, round robin and `conserve` take turns with `bros`. Figures are ratios within a run.
"""

import argparse
import asyncio
import itertools
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.coserving.load import PartLengths, gamma_gaps
from benchmarks.coserving.simulated import CONTENDERS, MIXES, BrosMix
from benchmarks.coserving.turns import BLOCK, LAYERS, TurnBench, bench, choose
from benchmarks.output import command, quantile, write_json
from deploy.small_model import ModelShape, make_model
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import LatencyModel
from workers.profiles import Profile

OFFLINE = 16  # at a time; the next as many when these are done
OFFLINE_PROMPT, OFFLINE_OUTPUT = (512, 1024), (32, 128)
LENGTHS = PartLengths(1024, 128, 512)
MOST = 1000  # tokens of an online prompt, and of an answer: both fit the model
TOGETHER = 16  # requests that decode at once, for the estimate of the capacity
HOST_KV_GIB = 2.0
ALONE = "online_only"
LOOSE = TurnTargets(60.0, 10.0)
WHOLE, BOUND, AGAIN = "whole", "slots, bound", "computed again"


@dataclass(frozen=True)
class SlotVariant:
    name: str
    blocks: int
    host_kv_gib: float
    contenders: tuple[str, ...]


@dataclass
class Experience:
    """Of one contender with one mix; several turns add up."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    normalised: list[float] = field(default_factory=list)  # seconds from arrival to end, by output tokens
    offline_tokens: int = 0  # of prompts and outputs, when there is a first token, and one a token
    seconds: float = 0.0
    preempted: int = 0
    again_tokens: int = 0

    def attained(self, slo: TurnTargets) -> tuple[float, float]:
        count = max(len(self.ttft), 1)
        ttft, tpot = sum(t <= slo.ttft_s for t in self.ttft), sum(t <= slo.tbt_s for t in self.tpot)
        return ttft / count, tpot / count


def held_tokens(mix: BrosMix) -> float:
    """KV of a request, halfway through its output: the mean of an online and an offline one."""
    online = mix.prompt[0] + mix.output[0] / 2
    offline = sum(OFFLINE_PROMPT) / 2 + sum(OFFLINE_OUTPUT) / 4
    return (online + offline) / 2


def bound_blocks(blocks: int) -> int:
    """With what all last blocks leave free at most, when the pool is full of requests of the shorter mix."""
    requests = blocks * BLOCK / min(held_tokens(mix) for mix in MIXES.values())
    return blocks + math.ceil(requests * (BLOCK - 1) / BLOCK)


def rate_of(mix: BrosMix, model: LatencyModel, share: float) -> float:
    """Online requests a second that take this share of the engine, decoding `TOGETHER` at once."""
    prompt, output = mix.prompt[0], mix.output[0]
    token = (model.constant / TOGETHER) + model.per_request + model.per_token
    token += model.per_context * (prompt + output / 2)
    return share / (prompt * model.per_token + model.constant / 2 + output * token)


class MixTurn:
    """One contender's turn: online requests of a mix for `seconds`, offline ones in batches beside them."""

    def __init__(self, engine: TurnBench, mix: BrosMix, rate: float, seconds: float, number: int) -> None:
        self._engine, self._mix, self._rate, self._seconds = engine.engine, mix, rate, seconds
        self._number = number
        # Lengths and arrivals are the same for all, tokens never: the host would have them.
        self._tokens = random.Random(time.monotonic_ns())
        self._offline = random.Random(number)
        self.until = 0.0

    async def run(self, into: Experience, with_offline: bool, told_apart: bool) -> None:
        started = time.monotonic()
        until = self.until = started + self._seconds
        offline = asyncio.create_task(self._batches(into, int(told_apart))) if with_offline else None
        lengths = self._mix.lengths(int(self._rate * self._seconds * 3) + 10)
        online: list[asyncio.Task[None]] = []
        for gap, (prompt, output) in zip(gamma_gaps(self._rate, 1.0, self._number), lengths, strict=False):
            if time.monotonic() + gap >= until:
                break
            await asyncio.sleep(gap)
            online.append(asyncio.create_task(self._online(min(prompt, MOST), min(output, MOST), into)))
        await asyncio.sleep(max(until - time.monotonic(), 0))
        into.seconds += time.monotonic() - started
        if offline is not None:
            offline.cancel()
            await asyncio.gather(offline, return_exceptions=True)
        await asyncio.wait_for(asyncio.gather(*online), 300)
        await self._engine.empty()

    async def _online(self, prompt: int, output: int, into: Experience) -> None:
        asked, first = time.monotonic(), 0.0
        async for _ in self._stream(prompt, output, 0):
            first = first or time.monotonic()
        ended = time.monotonic()
        into.ttft.append(first - asked)
        into.tpot.append((ended - first) / max(output - 1, 1))
        into.normalised.append((ended - asked) / output)

    async def _batches(self, into: Experience, priority: int) -> None:
        while True:
            async with asyncio.TaskGroup() as batch:
                for _ in range(OFFLINE):
                    prompt, output = (
                        self._offline.randint(*span) for span in (OFFLINE_PROMPT, OFFLINE_OUTPUT)
                    )
                    batch.create_task(self._one_offline(prompt, output, priority, into))

    async def _one_offline(self, prompt: int, output: int, priority: int, into: Experience) -> None:
        counted = False
        async for made in self._stream(prompt, output, priority):
            into.offline_tokens += len(made.outputs[0].token_ids) + (0 if counted else prompt)
            counted = True

    def _stream(self, prompt: int, output: int, priority: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        name = f"{priority}-{time.monotonic_ns()}-{next(_ids)}"
        tokens = [self._tokens.randint(32, 120) for _ in range(prompt)]
        return self._engine.llm.generate({"prompt_token_ids": tokens}, params, name, priority=priority)


_ids = itertools.count()


@dataclass
class SlotComparison:
    """What all rounds saw, and what the first engine said of the machine."""

    seconds: float
    share: float
    target_scale: float
    profile: Profile | None = None
    slo: dict[str, TurnTargets] = field(default_factory=dict)  # by mix
    seen: dict[tuple[str, str, str], Experience] = field(default_factory=dict)  # by mix, variant, contender

    async def turn(self, engine: TurnBench, mix: str, variant: str, contender: str, number: int) -> None:
        rate = rate_of(MIXES[mix], engine.model, self.share)
        choose(
            engine.chosen,
            ServingSettings(CONTENDERS.get(contender, contender), self.slo.get(mix, LOOSE)),
            engine.model,
        )
        print(f"{mix}, {variant}: {contender}", flush=True)
        before = len(engine.engine.iterations())
        into = self.seen.setdefault((mix, variant, contender), Experience())
        turn = MixTurn(engine, MIXES[mix], rate, self.seconds, number)
        await turn.run(into, with_offline=contender != ALONE, told_apart=contender != "first come")
        records = [r for r in engine.engine.iterations()[before:] if r.at <= turn.until]
        into.preempted += sum(r.preempted for r in records)
        into.again_tokens += sum(r.again_tokens for r in records)

    async def variant(self, variant: SlotVariant, model: Path, number: int) -> None:
        async with bench(model, LENGTHS, 1, variant.blocks, variant.host_kv_gib, self.profile) as engine:
            self.profile = engine.profile
            for mix in MIXES:
                if mix not in self.slo:
                    await self.turn(engine, mix, variant.name, ALONE, number)
                    alone = self.seen[mix, variant.name, ALONE]
                    ttft_s, tbt_s = quantile(alone.ttft, 0.99), quantile(alone.tpot, 0.99)
                    self.slo[mix] = TurnTargets(self.target_scale * ttft_s, self.target_scale * tbt_s)
                for contender in variant.contenders:
                    await self.turn(engine, mix, variant.name, contender, number)

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for (mix, variant, contender), got in self.seen.items():
            ttft, tpot = got.attained(self.slo[mix])
            rows.append(
                {
                    "mix": mix, "memory": variant, "policy": contender, "online_requests": len(got.ttft),
                    "normalised_latency_s": sum(got.normalised) / max(len(got.normalised), 1),
                    "ttft_p50_s": quantile(got.ttft, 0.5), "ttft_p99_s": quantile(got.ttft, 0.99),
                    "tpot_p99_s": quantile(got.tpot, 0.99), "ttft_attained": ttft, "tpot_attained": tpot,
                    "offline_tokens_per_s": got.offline_tokens / max(got.seconds, 1e-9),
                    "preempted": got.preempted, "again_tokens": got.again_tokens,
                }
            )  # fmt: skip
        return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the mixes, of ratios within each: the bound, and `bros` with whole blocks, to others."""
    by = {(r["mix"], r["memory"], r["policy"]): r for r in rows}
    named: dict[str, float] = {}

    def ratio(name: str, figure: str, of: tuple[str, str], to: tuple[str, str]) -> None:
        pairs = [
            (by[mix, *of][figure], by[mix, *to][figure])
            for mix in MIXES
            if (mix, *of) in by and (mix, *to) in by
        ]
        ratios = [one / other for one, other in pairs if other]
        if ratios:
            named[name] = sum(ratios) / len(ratios)

    ours = (WHOLE, "bros")
    for figure in ("normalised_latency_s", "offline_tokens_per_s", "ttft_attained", "tpot_attained"):
        ratio(f"bros_slots_vs_blocks_{figure}", figure, (BOUND, "bros"), ours)
        ratio(f"bros_blocks_vs_computed_again_{figure}", figure, ours, (AGAIN, "bros"))
        for other in ("first come", "round robin"):
            ratio(f"bros_vs_{other.replace(' ', '_')}_{figure}", figure, ours, (WHOLE, other))
    return named


def show(comparison: SlotComparison) -> None:
    for r in comparison.rows():
        print(
            f"  {r['mix']:<8} {r['memory']:<14} {r['policy']:<12} {r['online_requests']:>3} online"
            f"  norm. {r['normalised_latency_s'] * 1e3:6.1f} ms  TTFT p50, p99 {r['ttft_p50_s']:5.2f},"
            f" {r['ttft_p99_s']:6.2f} s  TPOT p99 {r['tpot_p99_s'] * 1e3:5.0f} ms"
            f"  attained {r['ttft_attained']:.2f}/{r['tpot_attained']:.2f}"
            f"  offline {r['offline_tokens_per_s']:6.0f} tok/s  preempted {r['preempted']}"
            f"  again {r['again_tokens']}",
            flush=True,
        )
    for name, value in figures(comparison.rows()).items():
        print(f"{name}: {value:.3f}", flush=True)


async def run(arguments: argparse.Namespace, after_round: Callable[[SlotComparison], None]) -> None:
    comparison = SlotComparison(
        12.0 if arguments.quick else arguments.seconds, arguments.share, arguments.target_scale
    )
    rounds = 1 if arguments.quick else arguments.rounds
    variants = [
        SlotVariant(WHOLE, arguments.blocks, HOST_KV_GIB, tuple(CONTENDERS)),
        SlotVariant(BOUND, bound_blocks(arguments.blocks), HOST_KV_GIB, ("bros",)),
        SlotVariant(AGAIN, arguments.blocks, 0.0, ("bros",)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, ModelShape(layers=LAYERS))
        for number in range(rounds):
            for variant in variants if number % 2 == 0 else variants[::-1]:
                await comparison.variant(variant, model, number)
            after_round(comparison)


def main() -> None:
    parser = command(__doc__, quick="one round of 12 s a turn: some four minutes")
    parser.add_argument("--rounds", type=int, default=2, help="forwards, then backwards")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals, a turn")
    parser.add_argument("--share", type=float, default=0.4, help="of the engine, that online work takes")
    parser.add_argument("--blocks", type=int, default=192, help="of KV: less than half of what is asked for")
    parser.add_argument(
        "--target-scale",
        type=float,
        default=3.0,
        help="targets, of what online requests have alone (P99): the paper's are several times that",
    )
    arguments = parser.parse_args()

    def after_round(comparison: SlotComparison) -> None:
        show(comparison)
        write_json(arguments.json, {**figures(comparison.rows()), "rows": comparison.rows()})

    asyncio.run(run(arguments, after_round))


if __name__ == "__main__":
    main()
