"""Loads of the engine steps, each an async function that returns its figures."""

import asyncio
import itertools
import random
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.results import Figures
from benchmarks.gpu.sizes import EngineSizes
from benchmarks.gpu.step_clock import parts_between
from benchmarks.harness.output import quantile
from benchmarks.kv.engine import EngineAnswer, KvEngine, counter
from benchmarks.kv.restore import leave_accelerator, restored_blocks
from workers.engine.coserving.iterations import read_iterations

OFFLINE = 10  # priority of offline requests
TIGHT_TTFT_MS = 60.0
FIRST_ORDINARY_TOKEN = 320  # lower token ids may be special


@dataclass
class EngineUnderTest:
    """An engine, and where it writes the times of its steps and its iterations."""

    engine: KvEngine
    sizes: EngineSizes
    clock: Path
    iterations: Path

    def prompt(self, seed: int, tokens: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(FIRST_ORDINARY_TOKEN, self.sizes.vocabulary) for _ in range(tokens)]

    async def answers(self, count: int, tokens: int, seed: int = 1, priority: int = 0) -> list[EngineAnswer]:
        """Ask for answers to prompts of the usual length, all at once."""
        asked = (
            self.engine.ask(self.prompt(seed + n, self.sizes.prompt), tokens, priority=priority)
            for n in range(count)
        )
        return list(await asyncio.gather(*asked))


Load = Callable[[EngineUnderTest], Awaitable[Figures]]


def gaps_while_all_decode(answers: Sequence[EngineAnswer]) -> list[float]:
    """Return the seconds between tokens from the last first token to the first end.

    All requests began at the same time, so that their arrivals share a clock.
    """
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    return [
        after - before
        for answer in answers
        for before, after in itertools.pairwise(answer.arrivals)
        if before >= begin and after <= end
    ]


def spread(name: str, values: list[float]) -> Figures:
    """Return median, mean and p99 in seconds."""
    if not values:
        return {}
    return {
        f"{name}_p50_s": quantile(values, 0.5),
        f"{name}_mean_s": statistics.mean(values),
        f"{name}_p99_s": quantile(values, 0.99),
    }


async def time_between_tokens(under: EngineUnderTest) -> Figures:
    """Time between tokens, and the parts of an engine's step, by number of answers."""
    found: Figures = {}
    for count in under.sizes.batches:
        began = time.monotonic()
        answers = await under.answers(count, under.sizes.decoded, 1000 * count)
        gaps = gaps_while_all_decode(answers)
        found |= spread(f"tbt_of_{count}", gaps)
        first = max(answer.arrivals[0] for answer in answers)
        parts = parts_between(under.clock, began + first, time.monotonic())
        found |= {f"{part.removesuffix('_ms')}_of_{count}_ms": value for part, value in parts.items()}
    return found


async def time_to_first_token(under: EngineUnderTest) -> Figures:
    """Time to the first token by length of the prompt: median of three prompts."""
    found: Figures = {}
    for length in under.sizes.prompts:
        times = [
            (await under.engine.ask(under.prompt(length + n, length), 1)).first_token_s for n in range(3)
        ]
        found[f"ttft_of_{length}_s"] = statistics.median(times)
    return found


async def beside_offline_decodes(under: EngineUnderTest) -> Figures:
    """Time between tokens of online answers while as many offline answers decode."""
    count = under.sizes.batches[-1] // 2
    tokens = under.sizes.decoded
    offline = asyncio.create_task(under.answers(count, 3 * tokens, 300_000, OFFLINE))
    await asyncio.sleep(1.0)
    answers = await under.answers(count, tokens, 310_000)
    offline.cancel()
    await asyncio.gather(offline, return_exceptions=True)
    return spread(f"tbt_of_{count}_beside_{count}_offline", gaps_while_all_decode(answers))


async def back_from_the_host(under: EngineUnderTest) -> Figures:
    """Time to the first token of prompts whose KV is on the host only, beside the time of computing them."""
    found: Figures = {}
    for length in under.sizes.prompts:
        prompt, session = under.prompt(7 * length, length), f"l{length}"
        computed = (await under.engine.ask(prompt, 1, session)).first_token_s
        restored = []
        for _ in range(3):
            await leave_accelerator(under.engine)
            before = await restored_blocks(under.engine)
            restored.append((await under.engine.ask(prompt, 1, session)).first_token_s)
            found[f"restored_blocks_of_{length}"] = await restored_blocks(under.engine) - before
        found[f"restored_{length}_s"] = statistics.median(restored)
        found[f"restored_vs_computed_{length}"] = computed / statistics.median(restored)
    return found


async def handed_over(prefills: EngineUnderTest, decodes: EngineUnderTest, port: int) -> Figures:
    """Time to the first token of prompts that one engine computes and the other answers."""
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
            prefill = asyncio.create_task(prefills.engine.ask(prompt, 1, transfer=export))
            taken.append((await decodes.engine.ask(prompt, 1, transfer=source)).first_token_s)
            await prefill
        found[f"handed_over_{length}_s"] = statistics.median(taken)
    found["transfers_refused"] = counter("conserve_kv_transfers_refused_total")
    return found


async def offline_prompts(under: EngineUnderTest, tokens: int, seed: int) -> list[asyncio.Task[EngineAnswer]]:
    """Start the offline prompts of the sizes, and wait until some of them run."""
    count, length = under.sizes.offline
    prompts = [under.prompt(seed + n, length) for n in range(count)]
    tasks = [asyncio.create_task(under.engine.ask(one, tokens, priority=OFFLINE)) for one in prompts]
    await asyncio.sleep(0.5)
    return tasks


async def ended(tasks: Sequence[asyncio.Task[EngineAnswer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def short_turns(
    under: EngineUnderTest, seed: int, tokens: int, targets: Mapping[str, float] | None = None
) -> list[EngineAnswer]:
    """Ask short turns one after the other, with pauses of 20 to 100 ms."""
    answers = []
    for number in range(under.sizes.turns):
        prompt = under.prompt(seed + number, under.sizes.prompt)
        answers.append(await under.engine.ask(prompt, tokens, arguments=targets))
        await asyncio.sleep(0.02 + 0.08 * random.Random(seed + number).random())
    return answers


def aborts_since(under: EngineUnderTest, before: int, took_s: float) -> Figures:
    """Return the iterations, aborts and offline tokens of the engine's log after its first `before` lines."""
    done = read_iterations(under.iterations)[before:]
    aborted = [one for one in done if one.aborted]
    found: Figures = {
        "iterations": len(done),
        "aborts": len(aborted),
        "offline_tokens_per_s": sum(one.offline_tokens for one in done if not one.aborted) / took_s,
    }
    if aborted:
        found |= spread("signal_to_abort", [one.signal_to_abort_s for one in aborted])
    return found


def gaps(answers: Sequence[EngineAnswer]) -> list[float]:
    return [after - before for one in answers for before, after in itertools.pairwise(one.arrivals)]


async def turns_beside_offline_work(under: EngineUnderTest) -> Figures:
    """Short turns alone, and while offline prompts take whatever is left."""
    alone = await short_turns(under, 50_000, 24)
    before, began = len(read_iterations(under.iterations)), time.monotonic()
    offline = await offline_prompts(under, 64, 60_000)
    beside = await short_turns(under, 70_000, 24)
    took = time.monotonic() - began
    await ended(offline)
    found = aborts_since(under, before, took)
    for name, answers in (("alone", alone), ("beside", beside)):
        found |= spread(f"turn_ttft_{name}", [one.first_token_s for one in answers])
        found |= spread(f"turn_tbt_{name}", gaps(answers))
    return found


async def answers_beside_aborts(under: EngineUnderTest) -> Figures:
    """Greedy answers undisturbed, and beside offline work whose iterations are aborted for each of them."""
    undisturbed = await short_turns_anew(under)
    again = await short_turns_anew(under)
    before, began = len(read_iterations(under.iterations)), time.monotonic()
    offline = await offline_prompts(under, 64, 90_000)
    disturbed = await short_turns_anew(under)
    took = time.monotonic() - began
    await ended(offline)

    def same(others: Sequence[EngineAnswer]) -> int:
        return sum(a.tokens == b.tokens for a, b in zip(undisturbed, others, strict=True))

    distinct = statistics.mean(len(set(one.tokens)) for one in undisturbed)
    ttft = spread("tight_turn_ttft", [one.first_token_s for one in disturbed])
    return {
        **{f"tight_{key}": value for key, value in aborts_since(under, before, took).items()},
        **ttft,
        "answers": len(undisturbed),
        "distinct_tokens_per_answer": distinct,
        "answers_equal_when_repeated": same(again),
        "answers_equal_beside_aborts": same(disturbed),
    }


async def short_turns_anew(under: EngineUnderTest) -> list[EngineAnswer]:
    """Ask the turns of `answers_beside_aborts`, with nothing of them in the prefix cache.

    Their target is so tight that an iteration with offline prompts has to be left for each of them.
    """
    await under.engine.llm.reset_prefix_cache()
    return await short_turns(under, 80_000, 32, {"slo_ttft_ms": TIGHT_TTFT_MS})


async def paper_load(under: EngineUnderTest) -> Figures:
    """Prompts and answers of the paper at its rate: alone, and with offline prompts beside."""
    prompt, output, rate, seconds = under.sizes.paper

    async def play(seed: int) -> list[EngineAnswer]:
        rng = random.Random(seed)
        tasks: list[asyncio.Task[EngineAnswer]] = []
        began, due = time.monotonic(), 0.0
        while (due := due + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            asked = under.prompt(seed + len(tasks), prompt)
            tasks.append(asyncio.create_task(under.engine.ask(asked, output)))
        return list(await asyncio.gather(*tasks))

    found: Figures = {}
    for name in ("alone", "beside_offline"):
        before, began = len(read_iterations(under.iterations)), time.monotonic()
        beside = name == "beside_offline"
        offline = await offline_prompts(under, 64, 400_000) if beside else []
        answers = await play(500_000 if beside else 600_000)
        took = time.monotonic() - began
        done = sum(task.done() for task in offline)
        await ended(offline)
        found |= spread(f"paper_ttft_{name}", [one.first_token_s for one in answers])
        found |= spread(f"paper_tbt_{name}", gaps(answers))
        if beside:
            found["paper_offline_requests_done"] = done
            found |= {f"paper_{key}": value for key, value in aborts_since(under, before, took).items()}
    return found
