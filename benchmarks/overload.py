"""Three answers to a shortage of KV under the same bursts: plain preemption, parking, and dropping layers.

    python -m benchmarks.overload [--quick] [--load LOAD] [--json FILE]

`preempt` is plain vLLM: running turns are computed again, and idle KV is lost. `park` is a fleet that moves
both to the host. `drop` is a fleet that also drops duplicated parameters (placement/overload/). Two engines
have little KV, and turns ask for 1.5 times the KV of both. The load `requests` has BurstGPT's lengths, and
`agents` those of real agents whose tools need no time. Bursts of these loads arrive within half a second.
Those of `long answers` arrive over 40 seconds, so that late turns wait for KV that others hold. In this load
the model's weights take most of an iteration's time, as on a GPU. On plain vLLM, conversations alternate
between the engines. Each burst has its own words, so that nothing is cached. All three policies play each
burst, in an order that is reversed after each burst. Then plain vLLM plays it with few conversations at a
time: an answer that differs from this one is wrong. TBT is the time between two tokens, TPOT its mean over an
answer. docs/measurements/overload.md has results.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.harness.engines import Bench, PlainEngines
from benchmarks.harness.fleet import RANDOM, UP_LIMIT_S, brought_up, samples
from benchmarks.harness.output import command, print_rows, report
from benchmarks.harness.rounds import forth_and_back
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import fleet_status, serving
from deploy.small_model import ModelShape, make_model
from traces import generators
from traces.format import TraceConversation, TraceTurn, load
from traces.replay import ReplayOptions
from traces.replay.client import Calibration, ChatClient, ToolStyle, calibrate
from traces.replay.player import Dialogue
from traces.simulator.metrics import percentile

SAMPLE = Path(__file__).parents[1] / "traces" / "samples" / "laptop.jsonl.gz"
PREEMPT, PARK, DROP = "preempt", "park", "drop"
MODEL, BLOCK = "small", 32
TEMPLATE_TOKENS = 128  # at most what a chat template adds to a trace's tokens
ASKED = 1.5  # how many times the KV of both engines a burst asks for
BURST_RATE = 40.0  # conversations a second
SHRINK, LEAST_TOKENS = 4, 400  # divisor of the laptop sample's lengths, and its shortest conversation
HEAVY = ModelShape(hidden=1_024, heads=16, kv_heads=4, intermediate=3_072)  # each token reads 400 MB
SHORTER = 5  # divisor of long answers' lengths
LASTING_S, LASTING_RATE = 40.0, 0.8  # at the speed of two idle cores this asks for `ASKED`
CALM = 4  # conversations at a time for which KV suffices
ROUNDS, QUICK_ROUNDS = 3, 1  # each plays all three policies forwards and back
LIMIT_S = 400.0
KEEP_ALIVE_S = 2.0  # uvicorn closes an idle connection after 5 s, perhaps just as a request is sent
PREEMPTIONS, CHANGES = "vllm:num_preemptions_total", "conserve_overload_changes_total"
DROPPED, RESTORED = (f'{CHANGES}{{change="{change}",outcome="done"}}' for change in ("drop", "restore"))
TIMES = ("drop", "restore", "return")  # "return" is 0, because parameters return within a restore
FIGURES = ("ttft_p99", "ttft_p50", "tbt_p50", "tbt_p99", "tpot_p50", "tpot_p99", "e2e_p50", "burst")
Answers = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of requests: the means are those of the KunServe paper, the lognormal spread is assumed."""

    name: str
    prompt: float
    output: float
    prompt_cv: float
    output_cv: float
    longest_prompt: int

    def draw(self, count: int, seed: int) -> Iterator[TraceConversation]:
        random = generators.stream(seed, self.name)
        for number in range(count):
            prompt = min(self.longest_prompt, generators.tokens(random, self.prompt, self.prompt_cv))
            output = min(8_192, generators.tokens(random, self.output, self.output_cv, least=2))
            yield TraceConversation(f"request-{number:06d}", 0.0, (TraceTurn(prompt, 0, output),))


# In the paper requests stay for 11 s, with a spread of 14.9 s, so BurstGPT's outputs must vary as much.
BURST_GPT = Lengths("BurstGPT", 642, 262, 1.2, 1.3, 8_192)
# Answers as agents and reasoning models write them: their KV stays long, and takes little computing.
LONG_ANSWERS = Lengths("BurstGPT with long answers", 642, 1_500, 0.7, 0.7, 8_192)


@dataclass(frozen=True)
class EngineKv:
    """Size of each engine's KV, longest context, tokens reserved for an answer, and the model."""

    blocks: int
    context: int
    headroom: int
    shape: ModelShape

    @property
    def longest(self) -> int:
        return self.context - TEMPLATE_TOKENS


BRIEF, LASTING = EngineKv(128, 2_048, 262, ModelShape()), EngineKv(34, 1_024, 300, HEAVY)


def requests(number: int) -> Iterable[TraceConversation]:
    return within_kv(number, generators.fit(BURST_GPT.draw(1_000, number), BRIEF.longest))


def agents(number: int) -> Iterable[TraceConversation]:
    sample = [replace(one, parent=None) for one in load(SAMPLE).conversations]
    generators.stream(number, "agents").shuffle(sample)
    shrunk = generators.fit(generators.scale(sample, generators.Scale(lengths=1 / SHRINK)), BRIEF.longest)
    long = (one for one in shrunk if one.turns[-1].context_tokens >= LEAST_TOKENS)
    return within_kv(
        number,
        (replace(one, turns=tuple(replace(turn, wait_s=0.0) for turn in one.turns)) for one in long),
    )


def long_answers(number: int) -> Iterable[TraceConversation]:
    drawn = generators.scale(LONG_ANSWERS.draw(1_000, number), generators.Scale(lengths=1 / SHORTER))
    times = generators.poisson(LASTING_RATE, generators.stream(number, "burst"))
    within = takewhile(lambda at: at < LASTING_S, times)
    return generators.arriving(generators.fit(drawn, LASTING.longest), within)


def within_kv(number: int, conversations: Iterable[TraceConversation]) -> Iterable[TraceConversation]:
    """Return conversations whose last contexts together need `ASKED` times the KV of both engines."""
    taken: list[TraceConversation] = []
    asked = 0
    for one in conversations:
        taken.append(one)
        asked += one.turns[-1].context_tokens
        if asked >= ASKED * 2 * BLOCK * BRIEF.blocks:
            break
    return generators.arriving(taken, generators.poisson(BURST_RATE, generators.stream(number, "burst")))


Burst = Callable[[int], Iterable[TraceConversation]]  # makes the burst with this number
LOADS: dict[str, tuple[EngineKv, Burst]] = {
    "requests": (BRIEF, requests),
    "agents": (BRIEF, agents),
    "long answers": (LASTING, long_answers),
}


@dataclass
class PolicyBursts:
    """Measurements of one policy, from all bursts of one load."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # duration of each burst
    tokens: int = 0
    recomputed: int = 0  # prompt tokens known from the previous turn that were not cached
    preemptions: float = 0.0
    drops: int = 0
    wrong: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "ttft_p50_s": median(self.ttft_s),
            "ttft_p99_s": percentile(self.ttft_s, 99),
            "tbt_p50_s": median(self.gaps_s),
            "tbt_p99_s": percentile(self.gaps_s, 99),
            "tpot_p50_s": median(self.tpot_s),
            "tpot_p99_s": percentile(self.tpot_s, 99),
            "e2e_p50_s": median(self.e2e_s),
            "burst_s": median(self.seconds),
            "burst_least_s": min(self.seconds),
            "burst_most_s": max(self.seconds),
            "tokens_per_s": self.tokens / sum(self.seconds),
            "recomputed_tokens": self.recomputed,
            "preemptions": self.preemptions,
            "drops": self.drops,
        }


def prepared(policy: str, kv: EngineKv = BRIEF, model: Path | None = None) -> FleetSpec:
    """Return a fleet of two mixed engines for a policy. Without `model`, the fleet makes a small one."""
    content = load_fleet(RANDOM).model_dump(mode="json", exclude_unset=True)
    content |= {"name": f"live-{policy}", "policy": "collocated", "overload": {"policy": policy}}
    content["model"] |= {"max_context": kv.context} | ({"path": str(model)} if model else {})
    content["engine"]["args"] |= {"num-gpu-blocks-override": kv.blocks, "block-size": BLOCK}
    content["engine"]["start_together"] = 2
    content["tiers"] = [{"name": "mixed", "role": "mixed", "replicas": 2}]
    content["conversation"] |= {"headroom_tokens": kv.headroom, "decoder_wait": f"{LIMIT_S:.0f}s"}
    content["coserving"] = {"tbt": "10s"}  # so that two busy cores do not refuse a drop plan
    return FleetSpec.of(content)


class BurstSubject:
    """A fleet, or engines without a fleet, on which bursts are played."""

    def __init__(self, urls: Sequence[str], home: FleetHome | None = None) -> None:
        self._urls, self._home = urls, home

    def burst(self, salt: str, conversations: Sequence[TraceConversation], seen: PolicyBursts) -> Answers:
        self._wait_until_whole()
        before = self.counts()
        answers = asyncio.run(self._play(salt, conversations, len(conversations), seen))
        after = self.counts()
        seen.preemptions += total(after, PREEMPTIONS) - total(before, PREEMPTIONS)
        seen.drops += int(after.get(DROPPED, 0.0) - before.get(DROPPED, 0.0))
        return answers

    def calm(self, salt: str, conversations: Sequence[TraceConversation]) -> Answers:
        """Play the conversations, only a few at a time, and return their answers, which count as right."""
        at_once = [replace(one, arrival_s=0.0) for one in conversations]
        return asyncio.run(self._play(salt, at_once, CALM, PolicyBursts()))

    def _wait_until_whole(self) -> None:
        """Wait until all layers that were dropped in the last burst are restored."""
        end = time.monotonic() + LIMIT_S
        while (counts := self.counts()).get(DROPPED, 0.0) > counts.get(RESTORED, 0.0):
            if time.monotonic() > end:
                raise SystemExit(f"layers were not restored within {LIMIT_S:.0f} s")
            time.sleep(0.5)

    async def _play(
        self, salt: str, conversations: Sequence[TraceConversation], at_once: int, seen: PolicyBursts
    ) -> Answers:
        slots = asyncio.Semaphore(at_once)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        no_limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=no_limit, connector=connector) as session:
            options = [
                ReplayOptions(url, MODEL, request_timeout_s=LIMIT_S, conversation_header="x-conversation-id")
                for url in self._urls
            ]
            clients = [ChatClient(session, one, MODEL) for one in options]
            sizes = await calibrate(session, self._urls[0], clients[0], ToolStyle.CALLS)
            began = time.monotonic()

            async def arrive(number: int, one: TraceConversation) -> tuple[str, list[str]]:
                await asyncio.sleep(began + one.arrival_s - time.monotonic())
                async with slots:
                    return one.id, await converse(clients[number % len(clients)], one, salt, sizes, seen)

            found = await asyncio.gather(*(arrive(n, one) for n, one in enumerate(conversations)))
            seen.seconds.append(time.monotonic() - began)
            for one in conversations if self._home is not None else ():
                async with session.delete(f"{self._urls[0]}/v1/conversations/{salt}-{one.id}"):
                    pass
        return dict(found)

    def counts(self) -> dict[str, float]:
        """Return the counters of the directory and the engines, by name and labels."""
        pages = list(self._urls)
        if self._home is not None:
            status = fleet_status(self._home)
            pages = [f"http://{page}" for page in (status.metrics, *(one.http for one in status.engines))]
        return samples(pages, PREEMPTIONS, CHANGES, "conserve_split")


async def converse(
    client: ChatClient, conversation: TraceConversation, salt: str, sizes: Calibration, seen: PolicyBursts
) -> list[str]:
    """Play all turns of a conversation, record their times in `seen`, and return the answers."""
    dialogue = Dialogue(conversation, sizes, ToolStyle.CALLS, salt, conversation.id)
    began, answers = time.monotonic(), []
    for index, turn in enumerate(conversation.turns):
        messages, asked = dialogue.prompt(index), time.monotonic()
        answer = await client.ask(messages, turn.output_tokens, f"{salt}-{conversation.id}")
        if index:
            seen.recomputed += max(0, dialogue.retained_tokens - BLOCK - (answer.cached_tokens or 0))
        dialogue.answered(index, answer)
        seen.ttft_s.append(answer.first_at - asked)
        seen.gaps_s += (later - earlier for earlier, later in pairwise(answer.arrivals))
        tokens = answer.completion_tokens or len(answer.arrivals)
        seen.tokens += tokens
        if tokens > 1:
            seen.tpot_s.append((answer.last_at - answer.first_at) / (tokens - 1))
        answers.append(answer.text)
    seen.e2e_s.append(time.monotonic() - began)
    return answers


def total(counts: dict[str, float], name: str) -> float:
    return sum(value for labelled, value in counts.items() if labelled.partition("{")[0] == name)


def measure(loads: Sequence[str], rounds: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Play all loads; return the figures, each for its worst load, and a table by load and policy."""
    seen = {load: {policy: PolicyBursts() for policy in (PREEMPT, PARK, DROP)} for load in loads}
    counts: dict[str, float] = {}
    for kv, alike in groupby(loads, lambda load: LOADS[load][0]):
        for metric, value in play_all(kv, {name: seen[name] for name in alike}, rounds).items():
            counts[metric] = counts.get(metric, 0.0) + value
    table = {f"{load}, {policy}": one.figures() for load, by in seen.items() for policy, one in by.items()}
    ratios = {
        load: {
            f"{name}_vs_{other}": table[f"{load}, {DROP}"][f"{name}_s"]
            / table[f"{load}, {other}"][f"{name}_s"]
            for other in (PREEMPT, PARK)
            for name in FIGURES
        }
        for load in loads
    }
    figures = {name: max(ratios[load][name] for load in loads) for name in ratios[loads[0]]}
    figures["wrong"] = sum(one.wrong for by in seen.values() for one in by.values())
    for name in TIMES:
        metric = f"conserve_split_{name}_seconds"
        figures[f"{name}_s"] = total(counts, f"{metric}_sum") / max(1.0, total(counts, f"{metric}_count"))
    changes = {
        name: value for name, value in counts.items() if "_bucket" not in name and "_created" not in name
    }
    return figures, {**table, **ratios, "changes": changes}


def play_all(kv: EngineKv, loads: dict[str, dict[str, PolicyBursts]], rounds: int) -> dict[str, float]:
    """Play each burst with every policy, record it in `loads`, and return the counters of `drop`'s fleet."""
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overload-")))
        make_model(work / "model", kv.shape)
        (work / "home").mkdir()
        fleets = {policy: prepared(policy, kv, work / "model") for policy in (PARK, DROP)}
        engines = stack.enter_context(PlainEngines(Bench(fleets[PARK], work, None, UP_LIMIT_S)))
        plain = BurstSubject(engines.urls())
        subjects = {PREEMPT: plain}
        for policy, fleet in fleets.items():
            home = stack.enter_context(brought_up(fleet))
            subjects[policy] = BurstSubject([serving(home).endpoint], home)
        bursts = {load: LOADS[load][1] for load in loads}
        for subject in subjects.values():  # the first drop of all is part of the warm-up
            subject.burst("burst--1", tuple(next(iter(bursts.values()))(-1)), PolicyBursts())
        for load, seen in loads.items():
            for number in range(2 * rounds):
                salt, burst = f"burst-{number}", tuple(bursts[load](number))
                answers = {
                    policy: subjects[policy].burst(salt, burst, seen[policy])
                    for policy in forth_and_back(list(subjects), number)
                }
                took = ", ".join(f"{policy} {one.seconds[-1]:.1f} s" for policy, one in seen.items())
                drops = f"{seen[DROP].drops} drops so far"
                print(f"{load}, burst {number + 1} of {2 * rounds}: {took}; {drops}", flush=True)
                right = plain.calm(salt, burst)
                for policy, given in answers.items():
                    pairs = (zip(given[name], right[name], strict=True) for name in right)
                    seen[policy].wrong += sum(one != other for pair in pairs for one, other in pair)
        return subjects[DROP].counts()


def main() -> None:
    parser = command(__doc__, quick="one round")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="only this load")
    options = parser.parse_args()
    loads = [load for load in LOADS if load in (options.load or LOADS)]
    figures, table = measure(loads, QUICK_ROUNDS if options.quick else ROUNDS)
    print_rows("by load and policy", ({"load": name, **row} for name, row in table.items() if ", " in name))
    report(options.json, figures, table=table)


if __name__ == "__main__":
    main()
