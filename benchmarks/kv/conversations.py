"""Plays agents' conversations on one engine: with our connector or plain, alone or beside offline work."""

import asyncio
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.fleet import ROOT
from benchmarks.harness.output import quantile
from benchmarks.harness.vllm_engine import VllmEngine, counter
from benchmarks.kv.engine import KvShape, kv_engine
from kvtransfer.config import ConnectorConfig
from kvtransfer.control.control_socket import ControlSocketClient
from traces.format import TraceConversation, load
from traces.generators import Scale, fit, scale

SAMPLE = ROOT / "traces" / "samples" / "turns.jsonl.gz"
OFFLINE_PRIORITY, OFFLINE_AT_ONCE = 10, 4
HOST_KV_GIB = 3.0


@dataclass(frozen=True)
class LoadShape:
    """Conversations to take from a trace: how many, and how much to shorten them and their waits."""

    conversations: int = 40
    lengths: float = 1 / 16
    times: float = 1 / 30
    longest_wait_s: float = 10.0
    turns: int = 6
    context: int = 6000
    arrivals_s: float = 45.0
    trace: Path = SAMPLE

    def load(self) -> list[TraceConversation]:
        by = Scale(lengths=self.lengths, waits=self.times, wait_cap_s=self.longest_wait_s)
        scaled = fit(scale(load(self.trace).conversations, by), self.context, self.turns)
        return [c for c in scaled if len(c.turns) > 1][: self.conversations]


@dataclass
class Played:
    """Answers, times and counts from one engine that played all conversations."""

    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    later_first_token_s: list[float] = field(default_factory=list)
    known_tokens: int = 0  # tokens of later prompts whose KV had been computed before
    recomputed_tokens: int = 0  # known tokens in whole blocks that were computed again
    recomputed_tails: int = 0  # known tokens computed again in a last block that was not full
    seconds: float = 0.0
    restored_blocks: float = 0.0
    offline_prompts: int = 0
    faults: int = 0


async def play_load(model: Path, load_shape: LoadShape, ours: bool, offline: bool) -> Played:
    """Play the conversations on an engine whose accelerator holds a third of their KV; return the results."""
    conversations, result = load_shape.load(), Played()
    longest = max(c.peak_context_tokens for c in conversations)
    living = sum(c.peak_context_tokens for c in conversations)
    blocks = 2 + max(living // 3, longest + 512) // KvShape.block_tokens
    shape = KvShape(model, blocks=blocks, context=longest + 64)
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/engine.sock"
        connector = ConnectorConfig(
            transfer=False, host_kv_gib=HOST_KV_GIB, park_after_s=5.0, control_socket=socket
        )
        async with kv_engine(shape, connector if ours else None) as engine:
            beside = asyncio.create_task(fill_offline(engine, shape, result)) if offline else None
            began = time.monotonic()
            await asyncio.gather(
                *(
                    converse(engine, one, number, load_shape.arrivals_s * number / len(conversations), result)
                    for number, one in enumerate(conversations)
                )
            )
            result.seconds = time.monotonic() - began
            if beside is not None:
                beside.cancel()
                await asyncio.wait([beside])
            if ours:
                result.faults = await release_all(engine, Path(socket), list(result.outputs))
            result.restored_blocks = counter("conserve_kv_restored_blocks_total")
    return result


async def converse(
    engine: VllmEngine, conversation: TraceConversation, number: int, at: float, result: Played
) -> None:
    rng, context = random.Random(number), list[int]()
    await asyncio.sleep(at)
    for index, turn in enumerate(conversation.turns):
        await asyncio.sleep(turn.wait_s)
        kept = context[: turn.cached_tokens]
        prompt = kept + [rng.randrange(5, 250) for _ in range(turn.prompt_tokens - len(kept))]
        answer = await engine.ask(prompt, max(1, turn.output_tokens), conversation.id)
        result.outputs.setdefault(conversation.id, []).append(answer.tokens)
        if index:
            # An answer's last token is never computed, and a prompt's last token always is.
            known = min(len(kept), len(context) - 1, len(prompt) - 1)
            whole = known // KvShape.block_tokens * KvShape.block_tokens
            result.later_first_token_s.append(answer.first_token_s)
            result.known_tokens += known
            result.recomputed_tokens += max(0, whole - answer.cached_tokens)
            result.recomputed_tails += known - whole
        context = prompt + answer.tokens


async def fill_offline(engine: VllmEngine, shape: KvShape, result: Played) -> None:
    """Keep offline requests running until cancelled; each takes a sixth of the accelerator's KV."""
    tokens = min(shape.context - 64, shape.blocks * shape.block_tokens // 6)
    rng = random.Random(0)

    async def repeat() -> None:
        while True:
            prompt = [rng.randrange(5, 250) for _ in range(tokens)]
            await engine.ask(prompt, 32, priority=OFFLINE_PRIORITY)
            result.offline_prompts += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(OFFLINE_AT_ONCE):
            group.create_task(repeat())


async def release_all(engine: VllmEngine, socket: Path, conversations: list[str]) -> int:
    """End every conversation; return how many blocks are still held, plus the number of faults found."""
    client = ControlSocketClient(socket)
    for conversation in conversations:
        await client.release(conversation)
    for _ in range(3):  # it takes steps to free released blocks and to end copies
        await asyncio.sleep(0.3)
        await engine.ask([5, 6, 7], 2)
    faults = await client.check()
    async for state in client.states():
        if state.running + state.waiting + state.offline_running + state.offline_waiting == 0:
            held = state.live_tokens + state.parked_tokens + state.host_used_tokens
            return len(faults) + held // KvShape.block_tokens
    return -1


def compared(plain: Played, ours: Played) -> dict[str, Any]:
    """Return the figures of our engine, those of plain vLLM, and their ratios."""
    turns = [(key, n) for key, outputs in plain.outputs.items() for n in range(len(outputs))]
    mine, theirs = ours.later_first_token_s, plain.later_first_token_s
    tails = ours.recomputed_tails, plain.recomputed_tails
    again, again_vllm = ours.recomputed_tokens, plain.recomputed_tokens
    return {
        "turns": len(turns),
        "turns_with_other_output": sum(plain.outputs[key][n] != ours.outputs[key][n] for key, n in turns),
        "known_tokens": plain.known_tokens,
        "recomputed_tokens": again,
        "recomputed_tokens_vllm": again_vllm,
        "recomputed_tails": tails[0],
        "recomputed_vs_vllm": again / max(1, again_vllm),
        "recomputed_vs_vllm_with_tails": (again + tails[0]) / max(1, again_vllm + tails[1]),
        "later_ttft_p50_s": statistics.median(mine),
        "later_ttft_p50_vllm_s": statistics.median(theirs),
        "later_ttft_p95_s": quantile(mine, 0.95),
        "later_ttft_p95_vllm_s": quantile(theirs, 0.95),
        "later_ttft_p95_vs_vllm": quantile(mine, 0.95) / quantile(theirs, 0.95),
        "restored_blocks": ours.restored_blocks,
        "leaked_blocks": ours.faults,
        "offline_prompts": ours.offline_prompts,
        "seconds": ours.seconds,
        "seconds_vllm": plain.seconds,
    }


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a coroutine function in a new process, because an engine's metrics live as long as its process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_coroutine, work, arguments).result()


def run_coroutine(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return asyncio.run(work(*arguments))
