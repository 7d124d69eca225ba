"""Loads for the engine steps; each is an async function that returns its figures."""

import asyncio
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Figures
from benchmarks.gpu.sizes import EngineSizes
from benchmarks.gpu.step_clock import parts_between
from benchmarks.harness.output import quantile
from benchmarks.harness.vllm_engine import EngineAnswer, VllmEngine, counter
from benchmarks.kv.engine import leave_accelerator, restored_blocks
from workers.engine.coserving.iterations import read_iterations

OFFLINE = 10  # priority of offline requests
TIGHT_TARGET = {"slo_ttft_ms": 60.0}  # to keep it, an iteration with offline prompts has to be aborted
FIRST_ORDINARY_TOKEN = 320  # lower token ids may be special


@dataclass(kw_only=True)
class EngineUnderTest(VllmEngine):
    """Running engine, with the log files of its steps and iterations."""

    sizes: EngineSizes
    clock: Path
    iterations: Path

    def prompt(self, seed: int, tokens: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(FIRST_ORDINARY_TOKEN, self.sizes.vocabulary) for _ in range(tokens)]

    async def answers(self, count: int, tokens: int, seed: int = 1, priority: int = 0) -> list[EngineAnswer]:
        """Send `count` prompts of the usual length together, and return the answers of `tokens` tokens."""
        prompts = (self.prompt(seed + n, self.sizes.prompt) for n in range(count))
        return list(await asyncio.gather(*(self.ask(one, tokens, priority=priority) for one in prompts)))


Load = Callable[[EngineUnderTest], Awaitable[Figures]]


def gaps_while_all_decode(answers: Sequence[EngineAnswer]) -> list[float]:
    """Return the gaps between tokens while all answers are being generated.

    The requests must have begun at the same time, because times count from the start of each request.
    """
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    return [
        after - before
        for answer in answers
        for before, after in pairwise(answer.arrivals)
        if before >= begin and after <= end
    ]


def gaps(answers: Sequence[EngineAnswer]) -> list[float]:
    return [after - before for one in answers for before, after in pairwise(one.arrivals)]


def spread(name: str, values: list[float]) -> Figures:
    """Return the median, mean and p99 of `values`, as figures in seconds named after `name`."""
    if not values:
        return {}
    return {
        f"{name}_p50_s": quantile(values, 0.5),
        f"{name}_mean_s": statistics.mean(values),
        f"{name}_p99_s": quantile(values, 0.99),
    }


async def time_between_tokens(under: EngineUnderTest) -> Figures:
    """Measure the time between tokens, and the parts of an engine's step, for each number of answers."""
    found: Figures = {}
    for count in under.sizes.batches:
        began = time.monotonic()
        answers = await under.answers(count, under.sizes.decoded, 1000 * count)
        found |= spread(f"tbt_of_{count}", gaps_while_all_decode(answers))
        first = max(answer.arrivals[0] for answer in answers)
        parts = parts_between(under.clock, began + first, time.monotonic())
        found |= {f"{part.removesuffix('_ms')}_of_{count}_ms": value for part, value in parts.items()}
    return found


async def time_to_first_token(under: EngineUnderTest) -> Figures:
    """Measure the time to first token for each prompt length: the median of three prompts."""
    found: Figures = {}
    for length in under.sizes.prompts:
        answers = [await under.ask(under.prompt(length + n, length), 1) for n in range(3)]
        found[f"ttft_of_{length}_s"] = statistics.median(one.first_token_s for one in answers)
    return found


async def beside_offline_decodes(under: EngineUnderTest) -> Figures:
    """Measure the time between tokens of online answers while equally many offline answers decode."""
    count, tokens = under.sizes.batches[-1] // 2, under.sizes.decoded
    offline = asyncio.create_task(under.answers(count, 3 * tokens, 300_000, OFFLINE))
    await asyncio.sleep(1.0)
    answers = await under.answers(count, tokens, 310_000)
    offline.cancel()
    await asyncio.gather(offline, return_exceptions=True)
    return spread(f"tbt_of_{count}_beside_{count}_offline", gaps_while_all_decode(answers))


async def back_from_the_host(under: EngineUnderTest) -> Figures:
    """Measure the time to first token of prompts whose KV is only on the host, and of computed prompts."""
    found: Figures = {}
    for length in under.sizes.prompts:
        prompt, session = under.prompt(7 * length, length), f"l{length}"
        computed = (await under.ask(prompt, 1, session)).first_token_s
        restored = []
        for _ in range(3):
            await leave_accelerator(under)
            before = await restored_blocks(under)
            restored.append((await under.ask(prompt, 1, session)).first_token_s)
            found[f"restored_blocks_of_{length}"] = await restored_blocks(under) - before
        found[f"restored_{length}_s"] = statistics.median(restored)
        found[f"restored_vs_computed_{length}"] = computed / statistics.median(restored)
    return found


async def handed_over(prefills: EngineUnderTest, decodes: EngineUnderTest, port: int) -> Figures:
    """Measure the time to first token of prompts that one engine computes and another engine answers."""
    found: Figures = {}
    for length in decodes.sizes.prompts:
        taken = []
        for number in range(3):
            prompt, transfer = decodes.prompt(11 * length + number, length), uuid.uuid4().hex
            source = {
                "do_remote_prefill": True,
                "transfer_id": transfer,
                "remote_host": "127.0.0.1",
                "remote_port": port,
                "remote_epoch": 1,
            }
            export = {"do_remote_decode": True, "transfer_id": transfer}
            prefill = asyncio.create_task(prefills.ask(prompt, 1, extra={"kv_transfer_params": export}))
            answer = await decodes.ask(prompt, 1, extra={"kv_transfer_params": source})
            taken.append(answer.first_token_s)
            await prefill
        found[f"handed_over_{length}_s"] = statistics.median(taken)
    found["transfers_refused"] = counter("conserve_kv_transfers_refused_total")
    return found


@asynccontextmanager
async def offline_prompts(under: EngineUnderTest, seed: int) -> AsyncIterator[Figures]:
    """Keep offline prompts of the usual sizes running.

    When the context ends, the yielded figures get the counts of iterations, aborts and offline tokens.
    """
    before, began, found = len(read_iterations(under.iterations)), time.monotonic(), Figures()
    count, length = under.sizes.offline
    prompts = [under.prompt(seed + n, length) for n in range(count)]
    tasks = [asyncio.create_task(under.ask(one, 64, priority=OFFLINE)) for one in prompts]
    await asyncio.sleep(0.5)
    yield found
    took_s = time.monotonic() - began
    found["offline_requests_done"] = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    done = read_iterations(under.iterations)[before:]
    aborted = [one for one in done if one.aborted]
    tokens = sum(one.offline_tokens for one in done if not one.aborted)
    found |= {"iterations": len(done), "aborts": len(aborted), "offline_tokens_per_s": tokens / took_s}
    found |= spread("signal_to_abort", [one.signal_to_abort_s for one in aborted])


async def short_turns(
    under: EngineUnderTest, seed: int, tokens: int, targets: Mapping[str, Any] | None = None
) -> list[EngineAnswer]:
    """Run short turns one after another, with pauses of 20 to 100 ms."""
    answers = []
    for number in range(under.sizes.turns):
        answers.append(
            await under.ask(under.prompt(seed + number, under.sizes.prompt), tokens, extra=targets)
        )
        await asyncio.sleep(0.02 + 0.08 * random.Random(seed + number).random())
    return answers


async def turns_beside_offline_work(under: EngineUnderTest) -> Figures:
    """Measure short turns alone, and while offline prompts use the rest of the engine's time."""
    alone = await short_turns(under, 50_000, 24)
    async with offline_prompts(under, 60_000) as found:
        beside = await short_turns(under, 70_000, 24)
    for name, answers in (("alone", alone), ("beside", beside)):
        found |= spread(f"turn_ttft_{name}", [one.first_token_s for one in answers])
        found |= spread(f"turn_tbt_{name}", gaps(answers))
    return found


async def answers_beside_aborts(under: EngineUnderTest) -> Figures:
    """Compare greedy answers with those of the same requests when the requests abort offline iterations."""

    async def anew() -> list[EngineAnswer]:
        await under.llm.reset_prefix_cache()
        return await short_turns(under, 80_000, 32, TIGHT_TARGET)

    undisturbed, again = await anew(), await anew()
    async with offline_prompts(under, 90_000) as found:
        disturbed = await anew()

    def same(others: Sequence[EngineAnswer]) -> int:
        return sum(a.tokens == b.tokens for a, b in zip(undisturbed, others, strict=True))

    return {
        **{f"tight_{key}": value for key, value in found.items()},
        **spread("tight_turn_ttft", [one.first_token_s for one in disturbed]),
        "answers": len(undisturbed),
        "distinct_tokens_per_answer": statistics.mean(len(set(one.tokens)) for one in undisturbed),
        "answers_equal_when_repeated": same(again),
        "answers_equal_beside_aborts": same(disturbed),
    }


async def paper_load(under: EngineUnderTest) -> Figures:
    """Measure the paper's prompts and answers at its rate: alone, and beside offline prompts."""
    prompt, output, rate, seconds = under.sizes.paper

    async def play(seed: int, name: str) -> Figures:
        rng = random.Random(seed)
        tasks: list[asyncio.Task[EngineAnswer]] = []
        began, due = time.monotonic(), 0.0
        while (due := due + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            tasks.append(asyncio.create_task(under.ask(under.prompt(seed + len(tasks), prompt), output)))
        answers = await asyncio.gather(*tasks)
        ttft = spread(f"paper_ttft_{name}", [one.first_token_s for one in answers])
        return ttft | spread(f"paper_tbt_{name}", gaps(answers))

    alone = await play(600_000, "alone")
    async with offline_prompts(under, 400_000) as found:
        beside = await play(500_000, "beside_offline")
    return alone | beside | {f"paper_{key}": value for key, value in found.items()}
