"""Turns of lesser SLO classes that sit iterations out: vLLM's real scheduler without a model; real vLLM."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from placement.iteration.interface import ServingSettings, TurnTargets
from placement.iteration.latency import LatencyModel
from tests.workers.coserving.test_prompt_scheduler import BOTH, Stepped, start, words
from workers.coserving.config import PROMPT_SCHEDULER, CoServingConfig
from workers.coserving.iterations import IterationRecord
from workers.coserving.profile import StandaloneEngine, StandaloneShape, coserving_engine

BETTER = {"ahead_s": 8.0, "class_s": 8.0}
TARGET_S = 0.1  # of Stepped; an iteration takes 20 ms and a token 1


def of_the_better_class(engine: Stepped, key: str, tbt_s: float) -> None:
    """As `TrackedRequests.add` makes it of what the gateway says."""
    tracked = engine.scheduler.tracked.by_id[key]
    tracked.ahead_s, tracked.class_s, tracked.slo = 8.0, 8.0, TurnTargets(5.0, tbt_s)


@BOTH
@pytest.mark.parametrize("waits", [False, True], ids=["nothing waits", "a prompt waits"])
def test_lesser_turns_sit_out_and_meet_their_target(
    small_model: Path, overlapping: bool, waits: bool
) -> None:
    engine = Stepped(small_model, overlapping, margin=0.0)
    asked = {f"lesser{n}": (words(20, n), 40) for n in range(3)} | {"better": (words(20, 9), 60)}
    start(engine, asked)
    of_the_better_class(engine, "better", 0.03)
    at: dict[str, list[float]] = {key: [] for key in asked}
    before = dict.fromkeys(asked, 0)
    alone = 0
    while not engine.outputs["better"] or "better" in engine.scheduler.requests:
        if waits and len(engine.steps) == 8:
            asked["prompt"] = words(200, 5), 2
            engine.ask("prompt", *asked["prompt"], priority=0)
        engine.advance()
        alone += set(engine.steps[-1]) == {"better"}
        for key in at:
            made = len(engine.outputs[key])
            at[key] += [engine.now] * (made - before[key])
            before[key] = made
    together = sum("better" in step and "lesser0" in step for step in engine.steps)
    assert alone > 1.5 * together > 0
    lesser = [later - earlier for n in range(3) for earlier, later in pairwise(at[f"lesser{n}"])]
    assert max(lesser) <= TARGET_S + 1e-6
    engine.finish(asked)


OUTPUT, LESSER = 48, 3
WIDE_MS, TIGHT_MS = 400.0, 20.0


async def played(
    engine: StandaloneEngine, said: dict[str, Any]
) -> tuple[list[Any], Sequence[IterationRecord]]:
    """Three turns that decode, and one beside them of which `said` is said: outputs, iterations meanwhile."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    async def turn(
        name: str, seed: int, tokens: int, extra: dict[str, Any], began: asyncio.Event
    ) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
        made: list[int] = []
        async for output in engine.llm.generate(TokensPrompt(prompt_token_ids=words(40, seed)), params, name):
            made = list(output.outputs[0].token_ids)
            began.set()
        return made

    await engine.empty()
    events = [asyncio.Event() for _ in range(LESSER + 1)]
    run = "better" if said else "plain"
    lesser = [
        asyncio.create_task(turn(f"{run}-{n}", n, 2 * OUTPUT, {"slo_tbt_ms": WIDE_MS}, events[n]))
        for n in range(LESSER)
    ]
    for event in events[:LESSER]:
        await event.wait()
    first = len(engine.iterations())
    better = await turn(f"{run}-one", 9, OUTPUT, {"slo_tbt_ms": TIGHT_MS, **said}, events[LESSER])
    meanwhile = engine.iterations()[first:]
    return [better, *await asyncio.gather(*lesser)], meanwhile


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheduler", ["conserve", "prompts_in_order"])
def test_on_real_vllm_they_sit_out_and_say_the_same(small_model: Path, scheduler: str) -> None:
    model = LatencyModel(per_token=2e-4, per_attended=0.0, per_context=0.0, constant=0.01)
    config = CoServingConfig(ServingSettings(slo=TurnTargets(2.0, WIDE_MS / 1000)), model, profiled=True)
    shape = StandaloneShape(small_model)
    if scheduler == "prompts_in_order":
        shape = StandaloneShape(small_model, scheduler=PROMPT_SCHEDULER)

    async def both() -> tuple[Any, Any]:
        async with coserving_engine(shape, config) as engine:
            return await played(engine, {}), await played(engine, BETTER)

    (plain, together), (classed, apart) = asyncio.run(both())
    assert classed == plain
    assert [len(one) for one in plain] == [OUTPUT, *[2 * OUTPUT] * LESSER]
    everyone = [sum(one.online_requests == LESSER + 1 for one in some) for some in (together, apart)]
    single = [sum(one.online_requests == 1 for one in some) for some in (together, apart)]
    print(f"of all, of one: {everyone[0]}, {single[0]} without classes; {everyone[1]}, {single[1]} with")
    assert single[0] == 0 and everyone[0] > 0.8 * OUTPUT
    assert single[1] > 0.7 * OUTPUT and everyone[1] > 0
