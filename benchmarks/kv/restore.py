"""A prompt that comes back from the host against one that is computed, and what that does to others."""

import asyncio
import itertools
import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kv.engine import KvEngine, KvShape, counter, kv_engine
from kvtransfer.config import ConnectorConfig

RESTORES = 4  # beside a request that decodes
ROUNDS = 4  # of these
SHARED_STEP_S = 0.002  # both tokens of a shared step arrive within this


@dataclass(frozen=True)
class RestorePlan:
    lengths: tuple[int, ...]
    beside: int  # tokens of the prompts that are restored beside a request that decodes
    decoded: int  # tokens of that request
    host_kv_gib: float


@dataclass(frozen=True)
class Window:
    """A time in which something else went on, on the clock of the request that decodes."""

    begin_s: float
    end_s: float


@dataclass
class Beside:
    """Gaps between tokens of requests that decode, some touched by other turns."""

    touched: list[float] = field(default_factory=list)
    before_step: list[float] = field(default_factory=list)  # of the other turn: it arrives, its KV is copied
    windows: list[Window] = field(default_factory=list)

    def lost_s(self, some: list[float], alone: float) -> float:
        """By a request that decodes, for each other turn."""
        return sum(gap - alone for gap in some) / len(self.windows)


async def restore_against_recompute(model: Path, plan: RestorePlan) -> dict[str, Any]:
    longest = max(plan.lengths)
    tokens = max(longest, RESTORES * plan.beside)  # all that are hit again must be there at once
    shape = KvShape(model, blocks=tokens // KvShape.block_tokens + 300, context=longest + 512)
    with tempfile.TemporaryDirectory() as folder:
        config = ConnectorConfig(transfer=False, host_kv_gib=plan.host_kv_gib, feed=f"{folder}/engine.sock")
        async with kv_engine(shape, config) as engine:
            rows = [await one_length(engine, length) for length in plan.lengths]
            overlap = await decode_beside_restores(engine, plan.beside, plan.decoded)
    return {"by_length": rows, "beside": overlap}


async def one_length(engine: KvEngine, length: int) -> dict[str, float]:
    rng = random.Random(length)
    recompute, restore = [], []
    for trial in range(3 if length < 4096 else 1):
        prompt = [rng.randrange(5, 250) for _ in range(length)]
        recompute.append((await engine.ask(prompt, 1, f"l{length}.{trial}")).first_token_s)
        for _ in range(3):
            await leave_accelerator(engine)
            before = await restored_blocks(engine)
            restore.append((await engine.ask(prompt, 1, f"l{length}.{trial}")).first_token_s)
            assert await restored_blocks(engine) > before, "nothing was restored"
    restored, computed = statistics.median(restore), statistics.median(recompute)
    return {
        "tokens": length,
        "restore_s": restored,
        "recompute_s": computed,
        "restore_tokens_per_s": length / restored,
        "recompute_tokens_per_s": length / computed,
        "restore_vs_recompute": computed / restored,
    }


async def restored_blocks(engine: KvEngine) -> float:
    await engine.ask([1, 2, 3], 2)  # counts come with a step
    return counter("conserve_kv_restored_blocks_total")


async def leave_accelerator(engine: KvEngine) -> None:
    """Every block leaves the accelerator once it is on the host; the host keeps what it has."""
    for _ in range(200):
        await engine.ask([5, 6, 7], 1)
        if await engine.llm.reset_prefix_cache():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("blocks were still being copied to the host after 10 s")


async def decode_beside_restores(engine: KvEngine, length: int, decoded: int) -> dict[str, float]:
    """Time between tokens of one request: alone, while other turns hit the cache, while they are restored.

    The turn beside it computes a token or two in a step that both share, restored or not: a step over its
    whole context. Before that step its prompt arrives, which any prompt of its length costs, and, if it is
    restored, its blocks are copied. So the gaps before that step are measured against nothing beside it, and
    what a turn takes from the other in all against what a turn takes whose KV is there.
    """
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 250) for _ in range(length)] for _ in range(RESTORES)]
    for number, prompt in enumerate(prompts):
        await engine.ask(prompt, 1, f"beside{number}")
    alone: list[float] = []
    restores, hits = Beside(), Beside()
    for _ in range(ROUNDS):
        await leave_accelerator(engine)
        alone += gaps((await engine.ask([7] * 64, decoded)).arrivals)
        await decode_beside(engine, prompts, decoded, restores)
        before = await restored_blocks(engine)
        await decode_beside(engine, prompts, decoded, hits)  # the same again: now they are there
        assert await restored_blocks(engine) == before, "what should be hit was restored"
    tbt_alone = statistics.mean(alone)
    tbt_copying, tbt_arriving = statistics.mean(restores.before_step), statistics.mean(hits.before_step)
    lost_to_copy = restores.lost_s(restores.before_step, tbt_alone) - hits.lost_s(hits.before_step, tbt_alone)
    gaps_each = len(restores.before_step) / len(restores.windows)
    return {
        "tokens": length,
        "turns": len(restores.windows),
        "tbt_alone_s": tbt_alone,
        "tbt_while_copying_s": tbt_copying,
        "tbt_while_hits_arrive_s": tbt_arriving,
        "restore_s": statistics.median(w.end_s - w.begin_s for w in restores.windows),
        "hit_s": statistics.median(w.end_s - w.begin_s for w in hits.windows),
        "lost_a_restore_s": restores.lost_s(restores.touched, tbt_alone),
        "lost_a_hit_s": hits.lost_s(hits.touched, tbt_alone),
        "lost_to_copy_s": lost_to_copy,
        "tbt_change_while_copying": tbt_copying / tbt_alone - 1,
        "tbt_change_while_hits_arrive": tbt_arriving / tbt_alone - 1,
        "tbt_change_by_copying": lost_to_copy / (gaps_each * tbt_alone),
    }


async def decode_beside(engine: KvEngine, prompts: list[list[int]], decoded: int, found: Beside) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    decoding = asyncio.create_task(engine.ask([8] * 64, decoded))
    await asyncio.sleep(0.1)
    windows = []
    for number, prompt in enumerate(prompts):
        at = clock() - began
        await engine.ask(prompt, 1, f"beside{number}")
        windows.append(Window(at, clock() - began))
        await asyncio.sleep(0.03)
    arrivals = (await decoding).arrivals
    complete = [window for window in windows if window.end_s < arrivals[-1]]
    assert complete, "the request beside them ended too early"
    found.windows += complete
    found.touched += inside(arrivals, complete)
    found.before_step += inside(arrivals, [before_its_step(w) for w in complete], ending=True)


def inside(arrivals: list[float], windows: list[Window], ending: bool = False) -> list[float]:
    """The gaps between tokens that overlap a window, or end in it."""
    return [
        after - before
        for before, after in itertools.pairwise(arrivals)
        if any((after if ending else before) < w.end_s and after > w.begin_s for w in windows)
    ]


def before_its_step(window: Window) -> Window:
    return Window(window.begin_s, window.end_s - SHARED_STEP_S)


def gaps(arrivals: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(arrivals)]
