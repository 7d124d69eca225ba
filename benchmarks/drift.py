"""Answers that tokenise otherwise than they were generated: what of them is computed again.

    python -m benchmarks.drift [--conversations 8] [--turns 5] [--quick] [--json FILE] [--fleet FILE]

The small model with a tokenizer of 512 merged pairs: nearly every sampled answer becomes other tokens when it
comes back as text. The same conversations (answers are sampled, of a fixed length) on two fleets of one
prefiller and one decoder, with exact tokens (`engine.exact_tokens`) and without. Of each later turn what its
decoder held and computed again is counted, in whole blocks, from the usage that engines report.
"""

import asyncio
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.live_policies import brought_up
from benchmarks.output import command, write_json
from benchmarks.prefixes import words
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import serving
from deploy.small_model import ModelShape, make_model

ROOT = Path(__file__).parents[1]
CONVERSATIONS, QUICK_CONVERSATIONS, TURNS = 8, 4, 5
MERGES, QUESTION_WORDS, ANSWER = 512, 60, 256
LIMIT_S = 300.0
VARIANTS = {"plain": False, "exact": True}


@dataclass
class Recomputed:
    """What one variant saw."""

    tokens: int = 0  # that the decoder held, in whole blocks, and computed again
    held: int = 0
    turns: int = 0
    failed: int = 0
    seconds: list[float] = field(default_factory=list)  # of later turns


async def conversation(
    http: httpx.AsyncClient, model: str, number: int, turns: int, block: int, seen: Recomputed
) -> None:
    random = Random(number)
    messages = [{"role": "user", "content": words(random, QUESTION_WORDS)}]
    held = 0
    for turn in range(turns):
        body = {
            "model": model, "messages": messages, "temperature": 1.0, "seed": 1_000 * number + turn,
            "max_tokens": ANSWER, "min_tokens": ANSWER,
        }  # fmt: skip
        headers = {"x-conversation-id": f"drift-{number}"}
        try:
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
        except httpx.HTTPError as wrong:
            print(f"  {number}: {wrong!r}", flush=True)
            seen.failed += 1
            return
        said: dict[str, Any] = answer.json()
        usage = said["usage"]
        if turn:
            whole = held // block * block
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            seen.turns, seen.held = seen.turns + 1, seen.held + whole
            seen.tokens += max(0, whole - cached)
            seen.seconds.append(answer.elapsed.total_seconds())
        held = usage["total_tokens"] - 1  # the last token's KV is computed with what follows it
        text = said["choices"][0]["message"]["content"]
        messages = [
            *messages, {"role": "assistant", "content": text},
            {"role": "user", "content": words(random, 10)},
        ]  # fmt: skip


def prepared(file: Path, model: Path, exact: bool) -> FleetSpec:
    fleet = load_fleet(file)
    changes = {
        "name": "drift",
        "model": fleet.model.model_copy(update={"path": str(model), "served_name": "drifting"}),
        "tiers": [tier.model_copy(update={"replicas": 1}) for tier in fleet.tiers],
        "engine": fleet.engine.model_copy(update={"exact_tokens": exact, "start_together": 2}),
    }
    return fleet.model_copy(update=changes)


async def play(url: str, model: str, conversations: int, turns: int, block: int) -> Recomputed:
    seen = Recomputed()
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        await asyncio.gather(
            *(conversation(http, model, number, turns, block, seen) for number in range(conversations))
        )
    return seen


def main() -> None:
    parser = command(__doc__, quick=f"{QUICK_CONVERSATIONS} conversations")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "laptop.yaml")
    options = parser.parse_args()
    count = QUICK_CONVERSATIONS if options.quick else options.conversations
    table: dict[str, Recomputed] = {}
    with tempfile.TemporaryDirectory(prefix="drift-") as directory:
        model = Path(directory) / "drifting"
        make_model(model, ModelShape(merges=MERGES))
        for name, exact in VARIANTS.items():
            fleet = prepared(options.fleet, model, exact)
            block = int(fleet.engine.args.get("block-size", 16))
            with brought_up(fleet) as home:
                url = serving(home).endpoint
                seen = asyncio.run(play(url, fleet.model.name, count, options.turns, block))
            table[name] = seen
            print(
                f"{name}: {seen.tokens} of {seen.held} tokens held were computed again, in {seen.turns} "
                f"turns of {median(seen.seconds or [0.0]):.2f} s; {seen.failed} failed",
                flush=True,
            )
    figures = {
        "recomputed_vs_plain": table["exact"].tokens / max(1, table["plain"].tokens),
        "recomputed_share_plain": table["plain"].tokens / max(1, table["plain"].held),
        "recomputed_share_exact": table["exact"].tokens / max(1, table["exact"].held),
        "failed": sum(one.failed for one in table.values()),
    }
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    write_json(options.json, figures | {"table": {name: asdict(one) for name, one in table.items()}})
    sys.exit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
