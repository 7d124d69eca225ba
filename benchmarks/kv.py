"""Keeping, parking and restoring conversations against plain vLLM: `python -m benchmarks.kv`.

Agent conversations on one decoder whose accelerator holds a third of what lives at once: how many prompt
tokens are computed again, and how long later turns wait for their first token, beside plain vLLM in the same
run; then the same while offline work fills the decoder. Answers must be equal, token for token. Then
restoring a prompt from the host against computing it, from 1k tokens up, and what restores do to the token
times of a request that decodes meanwhile. In the end everything is released; what is left counts.

In full about ten minutes on two quiet cores.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kv_engine import KvEngine, Shape, counter, kv_engine
from benchmarks.kv_load import LoadShape, Result, conversations, living_tokens, play
from benchmarks.kv_restore import RestorePlan, restore_against_recompute
from deploy.model.make import make_model
from kvtransfer.config import ConnectorConfig
from kvtransfer.feed import EngineFeed

OFFLINE_PRIORITY = 10
HOST_KV_GIB = 3.0


@dataclass(frozen=True)
class Plan:
    load: LoadShape
    restores: RestorePlan
    offline: bool


FULL = Plan(
    LoadShape(),
    RestorePlan((1024, 2048, 4096, 8192, 16384, 32000), beside=8192, decoded=400, host_kv_gib=HOST_KV_GIB),
    offline=True,
)
QUICK = Plan(
    LoadShape(conversations=12, lengths=1 / 64, turns=3, context=1500, arrivals_s=2.0, longest_wait_s=0.5),
    RestorePlan((1024, 8192), beside=8192, decoded=400, host_kv_gib=HOST_KV_GIB),
    offline=False,
)


@dataclass
class Played:
    result: Result
    seconds: float
    restored_blocks: float
    offline_prompts: int
    faults: int


async def play_load(model: Path, load_shape: LoadShape, ours: bool, offline: bool) -> Played:
    load = conversations(load_shape)
    longest = max(c.peak_context_tokens for c in load)
    blocks = 2 + max(living_tokens(load) // 3, longest + 512) // Shape.block_tokens
    shape = Shape(model, blocks=blocks, context=longest + 64)
    with tempfile.TemporaryDirectory() as folder:
        connector = ConnectorConfig(
            transfer=False, host_kv_gib=HOST_KV_GIB, park_after_s=5.0, feed=f"{folder}/engine.sock"
        )
        async with kv_engine(shape, connector if ours else None) as engine:
            answered: list[int] = []
            filling = asyncio.create_task(fill_offline(engine, shape, answered)) if offline else None
            start = time.monotonic()
            result = await play(engine, load, load_shape, shape.block_tokens)
            seconds = time.monotonic() - start
            if filling is not None:
                filling.cancel()
                await asyncio.wait([filling])
            faults = await release_all(engine, Path(connector.feed), result) if ours else 0
            restored = counter("conserve_kv_restored_blocks_total")
    return Played(result, seconds, restored, len(answered), faults)


async def fill_offline(engine: KvEngine, shape: Shape, answered: list[int]) -> None:
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


async def release_all(engine: KvEngine, feed_path: Path, result: Result) -> int:
    """Ends every conversation; returns blocks still held and faults found."""
    async with EngineFeed(feed_path) as feed:
        for conversation in result.outputs:
            await feed.release(conversation)
        for _ in range(3):  # what a release means for blocks happens in a step, as the ends of copies do
            await asyncio.sleep(0.3)
            await engine.ask([5, 6, 7], 2)
        faults = await feed.check()
        async for state in feed.states():
            if state.running + state.waiting + state.offline_running + state.offline_waiting == 0:
                held = state.live_tokens + state.parked_tokens + state.host_used_tokens
                return len(faults) + held // Shape.block_tokens
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


def measure(plan: Plan, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`tell` gets what is known so far after each part."""
    model = Path(tempfile.gettempdir()) / "conserve-benchmark-model"
    make_model(model)
    ours: Played = in_a_process(play_load, model, plan.load, True, False)
    plain: Played = in_a_process(play_load, model, plan.load, False, False)
    found = against(plain, ours)
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


def show(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if not isinstance(value, dict):
            print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    if "with_offline" in found:
        print("\nwith offline work")
        for name, value in found["with_offline"].items():
            print(f"  {name:30} {value:.4g}" if isinstance(value, float) else f"  {name:30} {value}")
    if "restore" not in found:
        return
    print("\nbeside restores: " + ", ".join(f"{k} {v:.4g}" for k, v in found["restore"]["beside"].items()))
    print(
        f"\n{'tokens':>8} {'restore s':>10} {'tokens/s':>9} {'compute s':>10} {'tokens/s':>9} {'faster':>8}"
    )
    for row in found["restore"]["by_length"]:
        restore = f"{row['restore_s']:10.3f} {row['restore_tokens_per_s']:9.0f}"
        compute = f"{row['recompute_s']:10.3f} {row['recompute_tokens_per_s']:9.0f}"
        print(f"{row['tokens']:8} {restore} {compute} {row['restore_vs_recompute']:7.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small load, for a check")
    parser.add_argument("--trace", type=Path, help="conversations to take instead of the sample's")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    if arguments.trace:
        plan = replace(plan, load=replace(plan.load, trace=arguments.trace))

    def tell(found: dict[str, Any]) -> None:
        print(f"\nafter {time.monotonic() - began:.0f} s", flush=True)
        show(found)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")

    began = time.monotonic()
    tell(measure(plan, tell))


if __name__ == "__main__":
    main()
