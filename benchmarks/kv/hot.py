"""How later turns fare on a hot decoder, with and without moves of conversations off it.

    python -m benchmarks.kv.hot [--quick] [--json FILE]

The fleet has two decoders. First, agents without a parent talk. Placement spreads their conversations by KV,
so nothing should move. Then agents talk whose conversations are all on one decoder, because a fork begins
where its parent is. Each turn appends the output of a tool. All engines share the cores of one machine.
"""

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from statistics import median, quantiles
from typing import Any

from openai import AsyncOpenAI

from benchmarks.harness.fleet import RANDOM, brought_up, changed, counted
from benchmarks.harness.output import command, print_figures, write_json
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import fleet_status, serving

AGENTS, TURNS, QUICK_TURNS = 8, 12, 6
APPENDED_WORDS, ANSWER_TOKENS = 500, 8
WAITS_S = (1.0, 3.0)  # shortest and longest wait for a tool
BLOCKS = 4096
LIMIT_S = 300.0  # longest request


@dataclass
class Seen:
    ttft_s: list[float] = field(default_factory=list)  # TTFT of later turns, without the first two
    texts: dict[tuple[str, int], str] = field(default_factory=dict)


def two_decoders(relieve_hot: bool) -> FleetSpec:
    fleet = load_fleet(RANDOM)
    return changed(
        fleet,
        name="hot",
        engine={"args": {"num-gpu-blocks-override": BLOCKS}},
        placement={"relieve_hot": relieve_hot},
    )


async def play(url: str, model: str, parent: str, turns: int) -> Seen:
    """Play all agents at the same time; if `parent` is given, as forks of that conversation."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=parent or "even", max_retries=2, timeout=LIMIT_S)
    seen = Seen()
    if parent:
        await ask(client, model, opening(99), {"x-session-id": parent})
    agents = (agent(client, model, number, parent, turns, seen) for number in range(AGENTS))
    await asyncio.gather(*agents)
    return seen


def opening(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Agent {number}: {words(Random(number), 100)}"}]


def words(random: Random, count: int) -> str:
    return " ".join(str(random.randrange(10_000)) for _ in range(count))


async def agent(client: AsyncOpenAI, model: str, number: int, parent: str, turns: int, seen: Seen) -> None:
    random, messages = Random(f"agent {number}"), opening(number)
    headers = {"x-session-id": f"{parent or 'even'}-{number}"}
    headers |= {"x-parent-session-id": parent} if parent else {}
    for turn in range(turns):
        ttft_s, text = await ask(client, model, messages, headers)
        if turn >= 2:
            seen.ttft_s.append(ttft_s)
        seen.texts[str(number), turn] = text
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"The tool says: {words(random, APPENDED_WORDS)}"})
        await asyncio.sleep(random.uniform(*WAITS_S))


async def ask(
    client: AsyncOpenAI, model: str, messages: list[dict[str, str]], headers: dict[str, str]
) -> tuple[float, str]:
    """Send one request; return the seconds until its first token, and the text of its answer."""
    began, first, parts = time.monotonic(), 0.0, []
    stream: Any = await client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        extra_headers=headers,
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.monotonic() - began
            parts.append(chunk.choices[0].delta.content)
    return first or time.monotonic() - began, "".join(parts)


def measure(relieve_hot: bool, turns: int) -> tuple[Seen, Seen, dict[str, Any]]:
    """Return the measurements of forks, those of agents without a parent, and how many of both moved.

    The agents without a parent come first. Placement counts idle conversations, so after the forks it would
    put all these agents on the other decoder.
    """
    fleet = two_decoders(relieve_hot)
    with brought_up(fleet) as home:
        url, status = serving(home).endpoint, fleet_status(home)
        pages = [f"http://{page}" for page in (*status.gateways, status.metrics) if page]

        def count() -> tuple[int, int]:
            moved = counted(pages, "conserve_conversations_moved_total", reason="hot", outcome="with_kv")
            return int(moved), int(counted(pages, "conserve_moved_recomputed_tokens_total"))

        before = count()
        even = asyncio.run(play(url, fleet.model.name, "", turns))
        between = count()
        skewed = asyncio.run(play(url, fleet.model.name, "parent", turns))
        after = count()
    counts = {
        "moved": after[0] - between[0],
        "recomputed_tokens": after[1] - before[1],
        "moved_when_even": between[0] - before[0],
    }
    return skewed, even, counts


def p95(values: list[float]) -> float:
    return quantiles(values, n=20)[-1]


def main() -> None:
    parser = command(__doc__, quick="half of the turns")
    options = parser.parse_args()
    turns = QUICK_TURNS if options.quick else TURNS
    fixed, fixed_even, _ = measure(False, turns)
    moving, moving_even, counts = measure(True, turns)
    found: dict[str, Any] = {
        **counts,
        "other_outputs": sum(fixed.texts[one] != moving.texts[one] for one in fixed.texts),
    }
    for name, here, there in (("hot", moving, fixed), ("even", moving_even, fixed_even)):
        found |= {
            f"{name}_ttft_p50_s": median(here.ttft_s),
            f"{name}_ttft_p95_s": p95(here.ttft_s),
            f"{name}_ttft_p50_vs_bound_for_life": median(here.ttft_s) / median(there.ttft_s),
            f"{name}_ttft_p95_vs_bound_for_life": p95(here.ttft_s) / p95(there.ttft_s),
        }
    print_figures(found)
    write_json(options.json, found)


if __name__ == "__main__":
    main()
