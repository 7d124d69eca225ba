"""A load of conversations and restores, each measured in a process of its own."""

import asyncio
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kv.copies import MadeShape, measure_copies
from benchmarks.kv.engine import (
    KvEngine,
    KvShape,
    LoadShape,
    PlayedTurns,
    conversations,
    counter,
    kv_engine,
    living_tokens,
    play,
)
from benchmarks.kv.processes import between_processes
from benchmarks.kv.restore import RestorePlan, restore_against_recompute
from deploy.small_model import make_model
from kvtransfer.config import ConnectorConfig
from kvtransfer.feed import EngineFeed

OFFLINE_PRIORITY = 10
HOST_KV_GIB = 3.0


@dataclass(frozen=True)
class KvPlan:
    load: LoadShape
    restores: RestorePlan
    offline: bool


FULL = KvPlan(
    LoadShape(),
    RestorePlan((1024, 2048, 4096, 8192, 16384, 32000), beside=8192, decoded=400, host_kv_gib=HOST_KV_GIB),
    offline=True,
)
QUICK = KvPlan(
    LoadShape(conversations=12, lengths=1 / 64, turns=3, context=1500, arrivals_s=2.0, longest_wait_s=0.5),
    RestorePlan((1024, 8192), beside=8192, decoded=400, host_kv_gib=HOST_KV_GIB),
    offline=False,
)


@dataclass
class Played:
    result: PlayedTurns
    seconds: float
    restored_blocks: float
    offline_prompts: int
    faults: int


async def play_load(model: Path, load_shape: LoadShape, ours: bool, offline: bool) -> Played:
    load = conversations(load_shape)
    longest = max(c.peak_context_tokens for c in load)
    blocks = 2 + max(living_tokens(load) // 3, longest + 512) // KvShape.block_tokens
    shape = KvShape(model, blocks=blocks, context=longest + 64)
    with tempfile.TemporaryDirectory() as folder:
        connector = ConnectorConfig(
            transfer=False, host_kv_gib=HOST_KV_GIB, park_after_s=5.0, feed=f"{folder}/engine.sock"
        )
        async with kv_engine(shape, connector if ours else None) as engine:
            answered: list[int] = []
            offline_work = asyncio.create_task(fill_offline(engine, shape, answered)) if offline else None
            start = time.monotonic()
            result = await play(engine, load, load_shape, shape.block_tokens)
            seconds = time.monotonic() - start
            if offline_work is not None:
                offline_work.cancel()
                await asyncio.wait([offline_work])
            faults = await release_all(engine, Path(connector.feed), result) if ours else 0
            restored = counter("conserve_kv_restored_blocks_total")
    return Played(result, seconds, restored, len(answered), faults)


async def fill_offline(engine: KvEngine, shape: KvShape, answered: list[int]) -> None:
    """Offline requests, always four there, each a sixth of what the accelerator holds."""
    tokens = min(shape.context - 64, shape.blocks * shape.block_tokens // 6)
    rng = random.Random(0)

    async def one_after_the_other() -> None:
        while True:
            prompt = [rng.randrange(5, 250) for _ in range(tokens)]
            answered.append(len((await engine.ask(prompt, 32, priority=OFFLINE_PRIORITY)).tokens))

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(one_after_the_other())


async def release_all(engine: KvEngine, feed_path: Path, result: PlayedTurns) -> int:
    """Ends every conversation; returns blocks still held and faults found."""
    feed = EngineFeed(feed_path)
    for conversation in result.outputs:
        await feed.release(conversation)
    for _ in range(3):  # what a release means for blocks happens in a step, as the ends of copies do
        await asyncio.sleep(0.3)
        await engine.ask([5, 6, 7], 2)
    faults = await feed.check()
    async for state in feed.states():
        if state.running + state.waiting + state.offline_running + state.offline_waiting == 0:
            held = state.live_tokens + state.parked_tokens + state.host_used_tokens
            return len(faults) + held // KvShape.block_tokens
    return -1


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """An engine's metrics live as long as its process: each gets one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run_coroutine, work, arguments).result()


def run_coroutine(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return asyncio.run(work(*arguments))


def against(plain: Played, ours: Played) -> dict[str, Any]:
    turns = [(key, n) for key, outputs in plain.result.outputs.items() for n in range(len(outputs))]
    different = [t for t in turns if plain.result.outputs[t[0]][t[1]] != ours.result.outputs[t[0]][t[1]]]
    mine, theirs = p95(ours.result.later_first_token_s), p95(plain.result.later_first_token_s)
    again, again_vllm = ours.result.recomputed_tokens, plain.result.recomputed_tokens
    return {
        "turns": len(turns),
        "turns_with_other_output": len(different),
        "known_tokens": plain.result.known_tokens,
        "recomputed_tokens": again,
        "recomputed_tokens_vllm": again_vllm,
        "recomputed_tails": ours.result.recomputed_tails,
        "recomputed_vs_vllm": again / max(1, again_vllm),
        "recomputed_vs_vllm_with_tails": (again + ours.result.recomputed_tails)
        / max(1, again_vllm + plain.result.recomputed_tails),
        "later_ttft_p50_s": statistics.median(ours.result.later_first_token_s),
        "later_ttft_p50_vllm_s": statistics.median(plain.result.later_first_token_s),
        "later_ttft_p95_s": mine,
        "later_ttft_p95_vllm_s": theirs,
        "later_ttft_p95_vs_vllm": mine / theirs,
        "restored_blocks": ours.restored_blocks,
        "leaked_blocks": ours.faults,
        "offline_prompts": ours.offline_prompts,
        "seconds": ours.seconds,
        "seconds_vllm": plain.seconds,
    }


def measure(plan: KvPlan, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`tell` gets what is known so far after each part."""
    model = Path(tempfile.gettempdir()) / "conserve-benchmark-model"
    make_model(model)
    copies = {**measure_copies(MadeShape()), **between_processes(MadeShape())}
    ours: Played = in_a_process(play_load, model, plan.load, True, False)
    plain: Played = in_a_process(play_load, model, plan.load, False, False)
    found = {**against(plain, ours), **copies}
    tell(found)
    found |= restored(in_a_process(restore_against_recompute, model, plan.restores))
    tell(found)
    if plan.offline:  # against plain vLLM without any offline work, which recomputes less
        beside: Played = in_a_process(play_load, model, plan.load, True, True)
        found["with_offline"] = against(plain, beside)
        found["recomputed_vs_vllm_with_offline"] = found["with_offline"]["recomputed_vs_vllm"]
        found["leaked_blocks"] += beside.faults
    return found


def restored(lengths: dict[str, Any]) -> dict[str, Any]:
    rows = lengths["by_length"]
    faster = [row["tokens"] for row in rows if row["restore_vs_recompute"] > 1]
    return {
        "restore_vs_recompute_8k": next(r["restore_vs_recompute"] for r in rows if r["tokens"] == 8192),
        "break_even_tokens": min(faster, default=None),
        "tbt_change_while_copying": lengths["beside"]["tbt_change_while_copying"],
        "tbt_change_by_copying": lengths["beside"]["tbt_change_by_copying"],
        "tbt_change_while_hits_arrive": lengths["beside"]["tbt_change_while_hits_arrive"],
        "restore": lengths,
    }
