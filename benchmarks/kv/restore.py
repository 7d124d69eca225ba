"""Measures restores of a prompt's KV, compared with computing it, and beside a request that decodes."""

import asyncio
import itertools
import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.vllm_engine import VllmEngine
from benchmarks.kv.engine import KvShape, kv_engine, leave_accelerator, restored_blocks
from kvtransfer.config import ConnectorConfig

RESTORES = 4  # number of restores beside a request that decodes
BESIDE_TOKENS, DECODED_TOKENS = 8192, 400  # tokens of a restored prompt, and of the other request's answer
ROUNDS = 4
SHARED_STEP_S = 0.002  # both tokens of a shared step arrive within this time


@dataclass
class Beside:
    """Gaps between a decoding request's tokens while other turns run, and how long those turns took."""

    touched: list[float] = field(default_factory=list)
    before_step: list[float] = field(default_factory=list)  # gaps while a turn arrives and its KV is copied
    seconds: list[float] = field(default_factory=list)

    def lost_s(self, gaps: list[float], alone: float) -> float:
        """Return the seconds that a turn costs the decoding request, whose gap without turns is `alone`."""
        return sum(gap - alone for gap in gaps) / len(self.seconds)


async def restore_against_recompute(
    model: Path, lengths: tuple[int, ...], host_kv_gib: float
) -> dict[str, Any]:
    longest = max(lengths)
    tokens = max(longest, RESTORES * BESIDE_TOKENS)  # so that all prompts that should hit fit together
    shape = KvShape(model, blocks=tokens // KvShape.block_tokens + 300, context=longest + 512)
    with tempfile.TemporaryDirectory() as folder:
        config = ConnectorConfig(
            transfer=False, host_kv_gib=host_kv_gib, control_socket=f"{folder}/engine.sock"
        )
        async with kv_engine(shape, config) as engine:
            rows = [await one_length(engine, length) for length in lengths]
            return {"by_length": rows, "beside": await decode_beside_restores(engine)}


async def one_length(engine: VllmEngine, length: int) -> dict[str, float]:
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


async def decode_beside_restores(engine: VllmEngine) -> dict[str, float]:
    """Measure a request's time between tokens alone, beside prompts that are cached, and beside restores.

    A turn whose prompt is cached or restored computes a token or two in one step that it shares with the
    request. Before that step, the turn's blocks are copied if it is restored. So gaps before the shared step
    are compared with gaps alone, and the total cost of a restored turn with that of a cached one.
    """
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 250) for _ in range(BESIDE_TOKENS)] for _ in range(RESTORES)]
    for number, prompt in enumerate(prompts):
        await engine.ask(prompt, 1, f"beside{number}")
    alone: list[float] = []
    restores, hits = Beside(), Beside()
    for _ in range(ROUNDS):
        await leave_accelerator(engine)
        arrivals = (await engine.ask([7] * 64, DECODED_TOKENS)).arrivals
        alone += (after - before for before, after in itertools.pairwise(arrivals))
        await decode_beside(engine, prompts, restores)
        before = await restored_blocks(engine)
        await decode_beside(engine, prompts, hits)
        assert await restored_blocks(engine) == before, "a prompt that should hit was restored"
    tbt_alone = statistics.mean(alone)
    tbt_copying, tbt_arriving = statistics.mean(restores.before_step), statistics.mean(hits.before_step)
    lost_to_copy = restores.lost_s(restores.before_step, tbt_alone) - hits.lost_s(hits.before_step, tbt_alone)
    gaps_each = len(restores.before_step) / len(restores.seconds)
    return {
        "tokens": BESIDE_TOKENS,
        "turns": len(restores.seconds),
        "tbt_alone_s": tbt_alone,
        "tbt_while_copying_s": tbt_copying,
        "tbt_while_hits_arrive_s": tbt_arriving,
        "restore_s": statistics.median(restores.seconds),
        "hit_s": statistics.median(hits.seconds),
        "lost_a_restore_s": restores.lost_s(restores.touched, tbt_alone),
        "lost_a_hit_s": hits.lost_s(hits.touched, tbt_alone),
        "lost_to_copy_s": lost_to_copy,
        "tbt_change_while_copying": tbt_copying / tbt_alone - 1,
        "tbt_change_while_hits_arrive": tbt_arriving / tbt_alone - 1,
        "tbt_change_by_copying": lost_to_copy / (gaps_each * tbt_alone),
    }


async def decode_beside(engine: VllmEngine, prompts: list[list[int]], found: Beside) -> None:
    """Send the prompts one after another while another request decodes; add the gaps to `found`."""
    clock = asyncio.get_running_loop().time
    origin = clock()
    decoding = asyncio.create_task(engine.ask([8] * 64, DECODED_TOKENS))
    await asyncio.sleep(0.1)
    windows = []
    for number, prompt in enumerate(prompts):
        began = clock() - origin
        await engine.ask(prompt, 1, f"beside{number}")
        windows.append((began, clock() - origin))
        await asyncio.sleep(0.03)
    arrivals = (await decoding).arrivals
    windows = [(began, ended) for began, ended in windows if ended < arrivals[-1]]
    assert windows, "the request beside the prompts ended too early"
    found.seconds += [ended - began for began, ended in windows]
    for before, after in itertools.pairwise(arrivals):
        if any(before < ended and after > began for began, ended in windows):
            found.touched.append(after - before)
        if any(began < after < ended - SHARED_STEP_S for began, ended in windows):
            found.before_step.append(after - before)
