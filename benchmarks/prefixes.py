"""How much is computed and moved for conversations with a shared prefix, on two prefillers and two decoders.

    python -m benchmarks.prefixes [--conversations 50] [--tokens 8000] [--kv-tokens N] [--quick] [--json FILE]
                                  [--fleet FILE]

Three frameworks have a system prompt each, and every conversation adds a question. The same arrivals are
played three times with different texts. In `apart` each conversation has its own API key, so that nothing is
shared. In `unknown` they are plain prompts, whose prefixes the directory does not know. In `shared` they are
chats.
Engines count the prompt tokens that they compute and the bytes that they fetch. `--kv-tokens` limits an
engine's KV, so that not all system prompts fit.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles

import httpx

from benchmarks.harness.chats import events, words
from benchmarks.harness.fleet import RANDOM, brought_up, changed, counted
from benchmarks.harness.output import command, report
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import fleet_status, serving

FRAMEWORKS, CONVERSATIONS, QUICK_CONVERSATIONS = 3, 50, 15
TOKENS, QUICK_TOKENS, ANSWER, QUESTION_WORDS = 8_000, 2_000, 8, 40
LOAD = 0.6  # share of what both prefillers can compute when nothing is shared
LIMIT_S, SETTLE_S = 300.0, 2.0
VARIANTS = ("apart", "unknown", "shared")


@dataclass(frozen=True)
class PrefixFigures:
    """Figures of one variant: `apart`, `unknown` or `shared`."""

    computed_tokens: float
    bytes_moved: float
    ttft_p50_s: float
    ttft_p95_s: float
    failed: int


@dataclass(frozen=True)
class PrefixTarget:
    """Fleet on which conversations are played."""

    url: str
    pages: Sequence[str]  # of the engines' metrics, without /metrics
    model: str

    def counts(self) -> tuple[float, float]:
        """Return the prompt tokens computed and the bytes fetched by all engines since their start."""
        computed = counted(self.pages, "vllm:prompt_tokens_by_source_total", source="local_compute")
        return computed, counted(self.pages, "conserve_kv_transfer_bytes_total")

    def words_in(self, tokens: int) -> int:
        """Return how many random words the model's tokenizer turns into `tokens` tokens."""
        body = {"model": self.model, "prompt": words(Random(0), 1_000)}
        answer = httpx.post(f"{self.url}/tokenize", json=body, timeout=60).raise_for_status()
        return round(tokens * 1_000 / int(answer.json()["count"]))


async def play(
    target: PrefixTarget, variant: str, system_words: int, arrivals: Sequence[float]
) -> tuple[list[float], int]:
    """Play one conversation per arrival; return the times to first token, and how many failed."""
    systems = [words(Random(f"{variant} {n}"), system_words) for n in range(FRAMEWORKS)]
    ttft: list[float] = []

    async def converse(http: httpx.AsyncClient, number: int, at: float) -> bool:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        system = systems[number % FRAMEWORKS]
        question = words(Random(f"{variant} conversation {number}"), QUESTION_WORDS)
        body = {"model": target.model, "max_tokens": ANSWER}
        if variant == "unknown":
            path, prompt = "/v1/completions", {"prompt": f"{system}\n\n{question}"}
        else:
            roles = {"system": system, "user": question}
            messages = [{"role": role, "content": content} for role, content in roles.items()]
            path, prompt = "/v1/chat/completions", {"messages": messages}  # type: ignore[dict-item]
        owner = f"owner-{number}" if variant == "apart" else "owner"
        headers = {"authorization": f"Bearer {owner}", "x-conversation-final": "true"}
        asked, first = time.monotonic(), 0.0
        try:
            async for _ in events(http, path, body | prompt, headers):
                first = first or time.monotonic()
        except httpx.HTTPError as error:
            print(f"  {variant} {number}: {error!r}", flush=True)
            return False
        ttft.append(first - asked)
        return True

    async with httpx.AsyncClient(base_url=target.url, timeout=LIMIT_S) as http:
        began = time.monotonic()
        done = await asyncio.gather(*(converse(http, number, at) for number, at in enumerate(arrivals)))
    return ttft, done.count(False)


def measure(
    target: PrefixTarget, variant: str, system_words: int, arrivals: Sequence[float]
) -> PrefixFigures:
    computed, moved = target.counts()
    ttft, failed = asyncio.run(play(target, variant, system_words, arrivals))
    time.sleep(SETTLE_S)
    computed_after, moved_after = target.counts()
    p95 = quantiles(ttft, n=20)[-1] if len(ttft) > 1 else 0.0
    found = PrefixFigures(computed_after - computed, moved_after - moved, median(ttft), p95, failed)
    print(f"{variant}: {found}", flush=True)
    return found


def poisson(target: PrefixTarget, system_words: int, count: int) -> list[float]:
    """Return arrival times at `LOAD` times the rate at which the fleet computes prompts one by one.

    That rate is measured first, which also warms the fleet up.
    """
    alone = [asyncio.run(play(target, f"alone {n}", system_words, [0.0]))[0][0] for n in range(2)][1]
    random, at, arrivals = Random(0), 0.0, []
    for _ in range(count):
        arrivals.append(at)
        at += random.expovariate(LOAD / alone)  # two cores compute one prompt at a time
    print(f"a prompt alone: {alone:.2f} s; {count} in {at:.0f} s", flush=True)
    return arrivals


def prepared(file: Path, kv_tokens: int | None) -> FleetSpec:
    fleet = load_fleet(file)
    fleet = changed(
        fleet,
        name="prefixes",
        tiers=[changed(tier, replicas=2) for tier in fleet.tiers],
        conversation={"prefiller_wait": LIMIT_S, "decoder_wait": LIMIT_S},
        engine={"start_together": 2},
    )
    if kv_tokens is None:
        return fleet
    block = int(fleet.engine.args["block-size"])
    args = {"num-gpu-blocks-override": kv_tokens // block}
    return changed(fleet, engine={"args": args}, model={"max_context": kv_tokens - block})  # vLLM keeps one


def ratios(table: dict[str, PrefixFigures]) -> dict[str, float]:
    """Return the ratios of `shared` to the other variants, and the number of failed conversations."""
    shared, found = table["shared"], dict[str, float]()
    for name, other in table.items():
        if name != "shared":
            found[f"prefill_tokens_vs_{name}"] = shared.computed_tokens / other.computed_tokens
            found[f"bytes_vs_{name}"] = shared.bytes_moved / max(1.0, other.bytes_moved)
            found[f"ttft_p95_vs_{name}"] = shared.ttft_p95_s / other.ttft_p95_s
    return found | {"failed": sum(one.failed for one in table.values())}


def main() -> None:
    parser = command(
        __doc__, quick=f"{QUICK_CONVERSATIONS} conversations, {QUICK_TOKENS} tokens", fleet=RANDOM
    )
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of a framework's system prompt")
    parser.add_argument("--kv-tokens", type=int, help="tokens of an engine's KV (default: as in the fleet)")
    options = parser.parse_args()
    fleet = prepared(options.fleet, options.kv_tokens)
    with brought_up(fleet) as home:
        pages = [f"http://{engine.http}" for engine in fleet_status(home).engines]
        target = PrefixTarget(serving(home).endpoint, pages, fleet.model.name)
        system_words = target.words_in(QUICK_TOKENS if options.quick else options.tokens)
        count = QUICK_CONVERSATIONS if options.quick else options.conversations
        arrivals = poisson(target, system_words, count)
        table = {variant: measure(target, variant, system_words, arrivals) for variant in VARIANTS}
    figures = ratios(table)
    report(options.json, figures, table=table)
    sys.exit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
