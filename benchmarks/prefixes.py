"""Conversations that begin alike, on two prefillers and two decoders: what is computed and moved of it.

    python -m benchmarks.prefixes [--conversations 50] [--tokens 8000] [--kv-tokens N] [--quick] [--json FILE]
                                  [--fleet FILE] [--before URL,ENGINE,ENGINE,...]

Three frameworks' system prompts, and a question to each conversation. The same arrivals are played three
times, with texts of their own: `apart`, each conversation of another owner, so that nothing is shared;
`unknown`, as plain prompts, whose beginnings the directory is not told of, while engines find what they have
cached; and `shared`, as chats. Prompt tokens that engines computed and bytes that prefillers sent are the
engines' own counts. `--kv-tokens` is what an engine's KV holds, where not all frameworks' prompts are to fit.
`--before` is another fleet of the same size that is up already, as of an earlier commit:
its gateway, and host:port of each of its engines. It is played the same chats, and ours only those.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.live_policies import brought_up
from benchmarks.output import command, write_json
from deploy.fleet import FleetSpec, load_fleet
from deploy.lifecycle.status import fleet_status, serving

ROOT = Path(__file__).parents[1]
FRAMEWORKS, CONVERSATIONS, QUICK_CONVERSATIONS = 3, 50, 15
TOKENS, QUICK_TOKENS, ANSWER, QUESTION_WORDS = 8_000, 2_000, 8, 40
LOAD = 0.6  # of what both prefillers carry when nothing is shared
LIMIT_S = 300.0
VARIANTS = ("apart", "unknown", "shared")


@dataclass(frozen=True)
class PrefixFigures:
    computed_tokens: float
    bytes_moved: float
    ttft_p50_s: float
    ttft_p95_s: float
    failed: int


def counted(engines: Sequence[str]) -> tuple[float, float]:
    """Prompt tokens computed and bytes fetched, of all engines since their start."""
    computed = moved = 0.0
    for engine in engines:
        page = httpx.get(f"http://{engine}/metrics", timeout=30).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "vllm:prompt_tokens_by_source_total":
                    computed += sample.value if sample.labels["source"] == "local_compute" else 0
                elif sample.name == "conserve_kv_transfer_bytes_total":
                    moved += sample.value
    return computed, moved


def words(random: Random, count: int) -> str:
    return " ".join(f"{random.randrange(16**4):04x}" for _ in range(count))


class PrefixPlay:
    """One variant."""

    def __init__(self, url: str, model: str, variant: str, system_words: int) -> None:
        self._url, self._model, self._variant = url, model, variant
        self._systems = [words(Random(f"{variant} {n}"), system_words) for n in range(FRAMEWORKS)]
        self.ttft: list[float] = []
        self.failed = 0

    async def run(self, arrivals: Sequence[float]) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=LIMIT_S) as http:
            began = time.monotonic()

            async def arriving(number: int, at: float) -> None:
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                await self._one(http, number)

            await asyncio.gather(*(arriving(number, at) for number, at in enumerate(arrivals)))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        random = Random(f"{self._variant} conversation {number}")
        system, question = self._systems[number % FRAMEWORKS], words(random, QUESTION_WORDS)
        body = {"model": self._model, "max_tokens": ANSWER, "temperature": 0.0, "stream": True}
        if self._variant == "unknown":
            path, asked = "/v1/completions", {"prompt": f"{system}\n\n{question}"}
        else:
            said = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            path, asked = "/v1/chat/completions", {"messages": said}  # type: ignore[dict-item]
        owner = f"owner-{number}" if self._variant == "apart" else "owner"
        headers = {"authorization": f"Bearer {owner}", "x-conversation-final": "true"}
        began = time.monotonic()
        try:
            async with http.stream("POST", path, json=body | asked, headers=headers) as answer:
                answer.raise_for_status()
                first = None
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and first is None:
                        first = time.monotonic() - began
                        self.ttft.append(first)
        except httpx.HTTPError as wrong:
            print(f"  {self._variant} {number}: {wrong!r}", flush=True)
            self.failed += 1


def played(
    variant: str, url: str, engines: Sequence[str], model: str, system_words: int, arrivals: Sequence[float]
) -> PrefixFigures:
    before, play = counted(engines), PrefixPlay(url, model, variant, system_words)
    asyncio.run(play.run(arrivals))
    time.sleep(2)
    after = counted(engines)
    p95 = quantiles(play.ttft, n=20)[-1] if len(play.ttft) > 1 else 0.0
    found = PrefixFigures(after[0] - before[0], after[1] - before[1], median(play.ttft), p95, play.failed)
    print(f"{variant}: {found}", flush=True)
    return found


def alone_s(url: str, model: str, system_words: int) -> float:
    """One such prompt on an idle fleet; the second of two, for the first pays for a start."""
    for number in range(2):
        play = PrefixPlay(url, model, f"alone {number}", system_words)
        asyncio.run(play.run([0.0]))
    return play.ttft[0]


def words_of(url: str, model: str, tokens: int) -> int:
    text = words(Random(0), 1_000)
    answer = httpx.post(f"{url}/tokenize", json={"model": model, "prompt": text}, timeout=60)
    answer.raise_for_status()
    return round(tokens * 1_000 / int(answer.json()["count"]))


def prepared(file: Path, kv_tokens: int | None) -> FleetSpec:
    fleet = load_fleet(file)
    tiers = [tier.model_copy(update={"replicas": 2}) for tier in fleet.tiers]
    waits = {"prefiller_wait": LIMIT_S, "decoder_wait": LIMIT_S}
    args, model = fleet.engine.args, fleet.model
    if kv_tokens is not None:
        block = int(args["block-size"])
        args = args | {"num-gpu-blocks-override": kv_tokens // block}
        model = model.model_copy(update={"max_context": kv_tokens - block})  # one block is vLLM's own
    engine = fleet.engine.model_copy(update={"start_together": 2, "args": args})
    talks = fleet.conversation.model_copy(update=waits)
    return fleet.model_copy(
        update={"name": "prefixes", "tiers": tiers, "conversation": talks, "engine": engine, "model": model}
    )


def main() -> None:
    parser = command(__doc__, quick=f"{QUICK_CONVERSATIONS} conversations, {QUICK_TOKENS} tokens")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a framework's system prompt")
    parser.add_argument("--kv-tokens", type=int, help="of an engine's KV; without, as in the fleet file")
    parser.add_argument("--before", help="another fleet: its gateway's URL, and host:port of each engine")
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "laptop.yaml")
    options = parser.parse_args()
    count = QUICK_CONVERSATIONS if options.quick else options.conversations
    tokens = QUICK_TOKENS if options.quick else options.tokens
    fleet = prepared(options.fleet, options.kv_tokens)
    table: dict[str, PrefixFigures] = {}
    with brought_up(fleet) as home:
        url, model = serving(home).endpoint, fleet.model.name
        system_words = words_of(url, model, tokens)
        alone = alone_s(url, model, system_words)
        random = Random(0)
        at, arrivals = 0.0, []
        for _ in range(count):
            arrivals.append(at)
            at += random.expovariate(LOAD / alone)  # two cores carry one prompt's work at a time
        print(f"a prompt of {tokens} tokens alone: {alone:.2f} s; {count} in {at:.0f} s", flush=True)
        engines = [engine.http for engine in fleet_status(home).engines]
        for variant in VARIANTS if not options.before else ("shared",):
            table[variant] = played(variant, url, engines, model, system_words, arrivals)
        if options.before:
            its_url, *its_engines = options.before.split(",")
            table["before"] = played("before", its_url, its_engines, model, system_words, arrivals)
    shared = table["shared"]
    figures: dict[str, float] = {}
    for name, other in table.items():
        if name != "shared":
            figures |= {
                f"prefill_tokens_vs_{name}": shared.computed_tokens / other.computed_tokens,
                f"bytes_vs_{name}": shared.bytes_moved / max(1.0, other.bytes_moved),
                f"ttft_p95_vs_{name}": shared.ttft_p95_s / other.ttft_p95_s,
            }
    figures["failed"] = sum(one.failed for one in table.values())
    for name, value in figures.items():
        print(f"{name} = {value:.3f}")
    write_json(options.json, figures | {"table": {name: asdict(one) for name, one in table.items()}})
    sys.exit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
