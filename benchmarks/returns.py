"""Parked conversations that come back: their KV brought back ahead, against on arrival.

    python -m benchmarks.returns [--turns 3] [--quick] [--json FILE] [--fleet FILE]

Agents hold more KV than their decoder, so that those away with a tool are parked on the host and their
blocks overwritten. They come back again and again, in rounds of a few turns: `ahead` they announce how long
their tools take, `early` they announce more, so that they are back when their KV has been on its way for a
quarter of a second. The same conversations take all rounds, in turn and back: a machine that is slower for a
minute is slower for all of them. What is compared: the time to the first token of turns that come back, and
the time between tokens of a turn that runs beside them all along, while all agents are in the same round.

What a return costs is bytes over the host's bandwidth, and then a little compute. Llama-3.3-70B has 80
layers of 8 KV heads of 128, 328 KB a token in bfloat16: of 100,000 tokens 33 GB, 8.2 GB for each of four
H100s. At 50 GB/s over each GPU's own bus they take 0.16 s, at 50 GB/s for all four 0.65 s. A turn that
appends 40 tokens computes for 15 ms: 35 GB of weights and 8.2 GB of KV from each GPU's memory at 3.35 TB/s
are 13 ms, 2 x 70.6e9 x 40 operations at 4 x 600 TFLOPS 1 ms more. So the bytes take 11 to 43 times what the
compute does, and as much as it with some 1,000 appended tokens. The small model has 8 KB a token, and its
returns are all compute. `HEAVY` has 131 KB a token, in as many KV heads as it has of queries, and next to no
weights: 260 MB for 2,000 tokens.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import httpx

from benchmarks.live_policies import brought_up
from benchmarks.output import command, write_json
from benchmarks.prefixes import words
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import serving
from deploy.small_model import ModelShape, make_model
from placement.prefetch_rules import ReturnRules

ROOT = Path(__file__).parents[1]
AGENTS, TURNS = 5, 3
THERE_AND_BACK, QUICK_THERE_AND_BACK = 2, 1
TOKENS, ANSWER, QUESTION_WORDS, AWAY_S = 2_000, 2, 1, 8.0
BESIDE_TOKENS, WORD_TOKENS = 500, 5  # a token a byte
HEAVY = ModelShape(hidden=64, heads=16, kv_heads=16, head_dim=128, intermediate=64, max_context=4_096)
KV_TOKENS, PREFILLER_TOKENS, BLOCK = 6_144, 4_608, 32  # less than the agents' 10,000
HOST_GIB, HEADROOM = 2.0, 128
LIMIT_S = 300.0
BEGUN_S = 0.25
ANNOUNCED_S = {"on_arrival": 0.0, "ahead": AWAY_S, "early": AWAY_S + ReturnRules().lead_s - BEGUN_S}
VARIANTS = tuple(ANNOUNCED_S)


@dataclass
class Returned:
    """What was seen in one round."""

    variant: str
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # tokens of their prompts that were not cached


class AwayAgents:
    """Conversations that take all rounds there and back once, so that their context hardly grows."""

    def __init__(self, http: httpx.AsyncClient, model: str, turns: int, name: str) -> None:
        self._http, self._model, self._turns, self._name = http, model, turns, name
        self.rounds = [Returned(variant) for variant in (*VARIANTS, *reversed(VARIANTS))]
        self._in_round: list[Returned | None] = [None] * AGENTS

    async def run(self) -> None:
        """Raises what one of its requests meets: with one agent less the rounds were not alike."""
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self._beside())
            agents = [group.create_task(self._agent(number)) for number in range(AGENTS)]
            await asyncio.gather(*agents)
            running.cancel()
        for number in (*range(AGENTS), "beside"):
            await self._http.delete(f"/v1/conversations/{self._name}-{number}")

    async def _agent(self, number: int) -> None:
        """A first turn, one that comes back before anything is counted, and the rounds' turns."""
        random = Random(f"{self._name} {number}")
        messages = [{"role": "user", "content": words(random, TOKENS // WORD_TOKENS)}]
        await asyncio.sleep(number * AWAY_S / AGENTS)
        came_back_to: list[Returned | None] = [None, None]
        came_back_to += [one for one in self.rounds for _ in range(self._turns)]
        for seen, to_come in zip_longest(came_back_to, came_back_to[1:]):
            began, first, text, usage = time.monotonic(), 0.0, "", None
            announced_s = ANNOUNCED_S[to_come.variant] if to_come else 0.0
            async for chunk in self._stream(f"{self._name}-{number}", messages, ANSWER, announced_s):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    first = first or time.monotonic() - began
                    text += choice["delta"].get("content") or ""
            if seen and usage:
                seen.ttft_s.append(first)
                details = usage.get("prompt_tokens_details") or {}
                seen.computed.append(usage["prompt_tokens"] - (details.get("cached_tokens") or 0))
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": words(random, QUESTION_WORDS)},
            ]
            self._in_round[number] = to_come
            if to_come or not seen:
                await asyncio.sleep(AWAY_S)
        self._in_round[number] = None

    async def _beside(self) -> None:
        """A turn that runs all along, one answer after another."""
        while True:
            last = 0.0
            messages = [{"role": "user", "content": "on"}]
            async for chunk in self._stream(f"{self._name}-beside", messages, BESIDE_TOKENS):
                if not chunk["choices"]:
                    continue
                now = time.monotonic()
                seen = self._in_round[0]
                if last and seen and all(one is seen for one in self._in_round):
                    seen.gaps_s.append(now - last)
                last = now

    async def _stream(
        self, name: str, messages: list[dict[str, str]], tokens: int, announced_s: float = 0.0
    ) -> AsyncIterator[Any]:
        headers = {"x-conversation-id": name}
        if announced_s:
            headers["x-conversation-away"] = f"{announced_s:g}"
        body = {
            "model": self._model, "messages": messages, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
            "max_tokens": tokens, "min_tokens": tokens,
        }  # fmt: skip
        path = "/v1/chat/completions"
        async with self._http.stream("POST", path, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


def prepared(file: Path, model: Path) -> FleetSpec:
    fleet = load_fleet(file)
    blocks = {"prefill": PREFILLER_TOKENS // BLOCK, "decode": KV_TOKENS // BLOCK}
    tiers = [
        tier.model_copy(update={
            "replicas": 1,
            "args": {**tier.args, "num-gpu-blocks-override": blocks[tier.role], "block-size": BLOCK},
        })
        for tier in fleet.tiers
    ]  # fmt: skip
    talks = fleet.conversation.model_copy(update={"park_after": AWAY_S / 4, "headroom_tokens": HEADROOM})
    named = {"path": str(model), "served_name": "heavy", "max_context": HEAVY.max_context}
    changes = {
        "name": "returns",
        "model": fleet.model.model_copy(update=named),
        "tiers": tiers,
        "conversation": talks,
        "engine": fleet.engine.model_copy(update={"start_together": 2}),
        "kv": fleet.kv.model_copy(update={"host_kv_gib": HOST_GIB}),
    }
    return fleet.model_copy(update=changes)


async def play(url: str, model: str, turns: int, times: int) -> list[Returned]:
    rounds = list[Returned]()
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        for number in range(times):
            agents = AwayAgents(http, model, turns, f"agents-{number}")
            await agents.run()
            rounds += agents.rounds
    return rounds


def main() -> None:
    parser = command(__doc__, quick="each round twice, not four times")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each round")
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "laptop.yaml")
    options = parser.parse_args()
    there_and_back = QUICK_THERE_AND_BACK if options.quick else THERE_AND_BACK
    with tempfile.TemporaryDirectory(prefix="heavy-") as directory:
        path = Path(directory) / "heavy"
        make_model(path, HEAVY)
        fleet = prepared(options.fleet, path)
        with brought_up(fleet) as home:
            url, model = serving(home).endpoint, fleet.model.name
            rounds = asyncio.run(play(url, model, options.turns, there_and_back))
            page = httpx.get(f"{url}/metrics", timeout=30).text
    for line in page.splitlines():
        if line.startswith("conserve_restores_ahead_total"):
            print(line)
    of: dict[str, list[Returned]] = {}
    for one in rounds:
        of.setdefault(one.variant, []).append(one)
    ttft = {variant: [s for one in seen for s in one.ttft_s] for variant, seen in of.items()}
    for variant, seen in of.items():
        computed = [tokens for one in seen for tokens in one.computed]
        medians = ", ".join(f"{1e3 * median(one.gaps_s):.2f}" for one in seen)
        means = ", ".join(f"{1e3 * mean(one.gaps_s):.2f}" for one in seen)
        print(
            f"{variant}: TTFT p50 {median(ttft[variant]):.3f} s ({min(ttft[variant]):.3f} to "
            f"{max(ttft[variant]):.3f}) of {len(ttft[variant])} turns, {median(computed):.0f} tokens not "
            f"cached; TBT by round p50 {medians}, mean {means} ms"
        )
    arrival, ahead, early = VARIANTS
    figures = {
        "ttft_p50_vs_on_arrival": median(ttft[ahead]) / median(ttft[arrival]),
        "early_ttft_p50_vs_on_arrival": median(ttft[early]) / median(ttft[arrival]),
        "tbt_vs_on_arrival": against(median, of[ahead], of[arrival]),
        "tbt_mean_vs_on_arrival": against(mean, of[ahead], of[arrival]),
        "early_tbt_vs_on_arrival": against(median, of[early], of[arrival]),
    }
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    write_json(options.json, figures | {"rounds": [asdict(one) for one in rounds]})


def against(
    of_gaps: Callable[[list[float]], float], these: Sequence[Returned], those: Sequence[Returned]
) -> float:
    """Rounds weigh the same."""
    return mean(of_gaps(one.gaps_s) for one in these) / mean(of_gaps(one.gaps_s) for one in those)


if __name__ == "__main__":
    main()
