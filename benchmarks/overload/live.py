"""The same bursts on plain vLLM, on a fleet that parks only, and on one whose decoders share layers: one run.

Two engines with little KV each, and turns that want 1.5 times what both have. Within half a second: requests
with BurstGPT's lengths, and conversations with those of real agents, whose tools answer at once so that all
of it is in use. Over two thirds of a minute: requests with long answers, so that those who come late wait
for KV that others hold; of a model whose weights take most of an iteration's time, as on a GPU, for what the
small one takes grows with all that runs, and KV is not what is short. On plain vLLM, which preempts,
conversations go to the two by turns. Each burst has words of its own, so that nothing of it is cached, and
is played by all three, forwards and back; then calmly, by plain vLLM: an answer that differs from that one
is wrong. TBT is the time between two tokens, of all of them; TPOT is of an answer, from its first token to
its last by the number between, with what it stood still meanwhile.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from statistics import median

import aiohttp
import httpx

from benchmarks.live_policies import brought_up
from benchmarks.overload.setups import BURST_GPT, LONG_ANSWERS
from benchmarks.peers.contenders import Bench, PlainEngines
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import fleet_status, serving
from deploy.small_model import ModelShape, make_model
from traces import generators
from traces.format import TraceConversation, load
from traces.replay import ReplayOptions
from traces.replay.client import Calibration, ChatClient, ToolStyle, calibrate
from traces.replay.player import Dialogue
from traces.simulator.metrics import percentile

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "configs" / "laptop.yaml"
SAMPLE = ROOT / "traces" / "samples" / "laptop.jsonl.gz"
PREEMPT, PARK, DROP = "preempt", "park", "drop"
MODEL = "small"
BLOCK = 32
TEMPLATE = 128  # tokens: what a template adds is not in a trace
ASKED = 1.5  # of the KV that both have
AT_ONCE = 40.0  # conversations a second: all within half a second
SHRINK, LEAST = 4, 400  # of the laptop sample, which is the agents' lengths / 16; shorter ones fill nothing
HEAVY = ModelShape(hidden=1_024, heads=16, kv_heads=4, intermediate=3_072)  # 400 MB that each token reads
SHORTER = 5  # of long answers' lengths
LASTING_S, LASTING_RATE = 40.0, 0.8  # at that rate they want `ASKED`, at the speed of two idle cores
CALM = 4  # conversations at a time: nothing gives way
ROUNDS, QUICK_ROUNDS = 3, 1  # each is all three, forwards and back
LIMIT_S, START_S = 400.0, 600.0
KEPT_S = 2.0  # an idle connection: uvicorn closes it after 5 s, perhaps as it is used again
PREEMPTIONS = "vllm:num_preemptions_total"
DROPPED, RESTORED = (
    f'conserve_overload_changes_total{{change="{change}",outcome="done"}}' for change in ("drop", "restore")
)
# For the first two an engine stands still; while parameters return it serves.
TIMES = tuple(f"conserve_split_{what}_seconds" for what in ("drop", "restore", "return"))
COUNTED = (PREEMPTIONS, "conserve_overload_changes_total", "conserve_split")
Answers = dict[str, list[str]]


@dataclass(frozen=True)
class Burst:
    number: int
    conversations: tuple[TraceConversation, ...]  # arrivals from 0

    @property
    def salt(self) -> str:
        return f"burst-{self.number}"


@dataclass(frozen=True)
class EngineKv:
    """What each of the two engines has, what is kept of it for an answer, and what model it is of."""

    blocks: int
    context: int
    headroom: int
    shape: ModelShape

    @property
    def longest(self) -> int:
        return self.context - TEMPLATE


BRIEF, LASTING = EngineKv(128, 2_048, 262, ModelShape()), EngineKv(34, 1_024, 300, HEAVY)


def requests(number: int) -> Burst:
    return _at_once(number, generators.fit(BURST_GPT.draw(1_000, number), BRIEF.longest))


def agents(number: int) -> Burst:
    sample = [replace(one, parent=None) for one in load(SAMPLE).conversations]
    generators.stream(number, "agents").shuffle(sample)
    shrunk = generators.fit(generators.scale(sample, generators.Scale(lengths=1 / SHRINK)), BRIEF.longest)
    long = (one for one in shrunk if one.turns[-1].context_tokens >= LEAST)
    at_once = (replace(one, turns=tuple(replace(turn, wait_s=0.0) for turn in one.turns)) for one in long)
    return _at_once(number, at_once)


def long_answers(number: int) -> Burst:
    drawn = generators.scale(LONG_ANSWERS.draw(1_000, number), generators.Scale(lengths=1 / SHORTER))
    times = generators.poisson(LASTING_RATE, generators.stream(number, "burst"))
    within = takewhile(lambda at: at < LASTING_S, times)
    return Burst(number, tuple(generators.arriving(generators.fit(drawn, LASTING.longest), within)))


def _at_once(number: int, conversations: Iterable[TraceConversation]) -> Burst:
    """As many as want `ASKED` times the KV at the end of their last turns."""
    taken: list[TraceConversation] = []
    wanted = 0
    for one in conversations:
        taken.append(one)
        wanted += one.turns[-1].context_tokens
        if wanted >= ASKED * 2 * BLOCK * BRIEF.blocks:
            break
    times = generators.poisson(AT_ONCE, generators.stream(number, "burst"))
    return Burst(number, tuple(generators.arriving(taken, times)))


@dataclass(frozen=True)
class BurstLoad:
    kv: EngineKv
    burst: Callable[[int], Burst]


LOADS = {
    "requests": BurstLoad(BRIEF, requests),
    "agents": BurstLoad(BRIEF, agents),
    "long answers": BurstLoad(LASTING, long_answers),
}


@dataclass
class PolicyBursts:
    """What one policy saw of one load."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)  # of each answer, the mean of its gaps
    e2e_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each burst
    tokens: int = 0
    again: int = 0  # prompt tokens that the conversation's turn before had, and that were not found
    preemptions: float = 0.0
    drops: int = 0  # of layers, by a group
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
            "recomputed_tokens": self.again,
            "preemptions": self.preemptions,
            "drops": self.drops,
        }


def prepared(policy: str, kv: EngineKv = BRIEF, model: Path | None = None) -> FleetSpec:
    """`model`: where one of that shape is; a fleet makes the small one."""
    content = load_fleet(FLEET).model_dump(mode="json", exclude_unset=True)
    content |= {"name": f"live-{policy}", "policy": "collocated", "overload": {"policy": policy}}
    content["model"] |= {"max_context": kv.context} | ({"path": str(model)} if model else {})
    content["engine"]["args"] |= {"num-gpu-blocks-override": kv.blocks, "block-size": BLOCK}
    content["engine"]["start_together"] = 2
    content["tiers"] = [{"name": "mixed", "role": "mixed", "replicas": 2}]
    content["conversation"] |= {"headroom_tokens": kv.headroom, "decoder_wait": f"{LIMIT_S:.0f}s"}
    content["coserving"] = {"tbt": "10s"}  # a plan is not refused for what two busy cores take
    return FleetSpec.model_validate(content)


@contextmanager
def plain_engines(fleet: FleetSpec) -> Iterator[list[str]]:
    """vLLM with the options of the fleet's engines, as many as it has."""
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        work = Path(folder)
        (work / "home").mkdir()
        with PlainEngines(Bench(fleet, work, None, START_S)) as engines:
            yield engines.urls()


class BurstSubject:
    """What bursts are played on: a fleet, or engines without one."""

    def __init__(self, urls: Sequence[str], home: FleetHome | None = None) -> None:
        self._urls, self._home = urls, home

    @classmethod
    def of_fleet(cls, home: FleetHome) -> "BurstSubject":
        return cls([serving(home).endpoint], home)

    def burst(self, burst: Burst, seen: PolicyBursts) -> Answers:
        self._until_whole()
        before = self.counted()
        said = asyncio.run(self._played(burst, len(burst.conversations), seen))
        after = self.counted()
        seen.preemptions += total(after, PREEMPTIONS) - total(before, PREEMPTIONS)
        seen.drops += int(after.get(DROPPED, 0.0) - before.get(DROPPED, 0.0))
        return said

    def _until_whole(self) -> None:
        """What was dropped in the burst before has come back."""
        end = time.monotonic() + LIMIT_S
        while (counted := self.counted()).get(DROPPED, 0.0) > counted.get(RESTORED, 0.0):
            if time.monotonic() > end:
                raise SystemExit(f"layers were not restored within {LIMIT_S:.0f} s")
            time.sleep(0.5)

    def calm(self, burst: Burst) -> Answers:
        """A few conversations at a time, so that nothing gives way."""
        slowly = replace(
            burst, conversations=tuple(replace(one, arrival_s=0.0) for one in burst.conversations)
        )
        return asyncio.run(self._played(slowly, CALM, PolicyBursts()))

    async def _played(self, burst: Burst, at_once: int, seen: PolicyBursts) -> Answers:
        slots = asyncio.Semaphore(at_once)
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            clients, sizes = await self._clients(session)
            began = time.monotonic()

            async def arriving(number: int, one: TraceConversation) -> tuple[str, list[str]]:
                await asyncio.sleep(began + one.arrival_s - time.monotonic())
                async with slots:
                    dialogue = Dialogue(one, sizes, ToolStyle.CALLS, burst.salt, one.id)
                    return one.id, await self._conversation(
                        clients[number % len(clients)], dialogue, f"{burst.salt}-{one.id}", one, seen
                    )

            found = await asyncio.gather(*(arriving(n, one) for n, one in enumerate(burst.conversations)))
            seen.seconds.append(time.monotonic() - began)
            if self._home is not None:
                for one in burst.conversations:
                    path = f"{self._urls[0]}/v1/conversations/{burst.salt}-{one.id}"
                    async with session.delete(path):
                        pass
        return dict(found)

    async def _clients(self, session: aiohttp.ClientSession) -> tuple[list[ChatClient], Calibration]:
        options = [
            ReplayOptions(url, MODEL, request_timeout_s=LIMIT_S, conversation_header="x-conversation-id")
            for url in self._urls
        ]
        clients = [ChatClient(session, one, MODEL) for one in options]
        return clients, await calibrate(session, self._urls[0], clients[0], ToolStyle.CALLS)

    async def _conversation(
        self,
        client: ChatClient,
        dialogue: Dialogue,
        name: str,
        conversation: TraceConversation,
        seen: PolicyBursts,
    ) -> list[str]:
        began, said = time.monotonic(), []
        for index, turn in enumerate(conversation.turns):
            messages, asked = dialogue.prompt(index), time.monotonic()
            answer = await client.ask(messages, turn.output_tokens, name)
            seen.again += (
                max(0, dialogue.retained_tokens - BLOCK - (answer.cached_tokens or 0)) if index else 0
            )
            dialogue.answered(index, answer)
            seen.ttft_s.append(answer.first_at - asked)
            seen.gaps_s += (later - earlier for earlier, later in pairwise(answer.arrivals))
            tokens = answer.completion_tokens or len(answer.arrivals)
            seen.tokens += tokens
            if tokens > 1:
                seen.tpot_s.append((answer.last_at - answer.first_at) / (tokens - 1))
            said.append(answer.text)
        seen.e2e_s.append(time.monotonic() - began)
        return said

    def counted(self) -> dict[str, float]:
        """Of the directory and of engines, by name and labels."""
        pages = list(self._urls)
        if self._home is not None:
            status = fleet_status(self._home)
            pages = [f"http://{page}" for page in (status.metrics, *(one.http for one in status.engines))]
        found: dict[str, float] = {}
        for page in pages:
            for line in httpx.get(f"{page}/metrics", timeout=30).text.splitlines():
                if line.startswith(COUNTED):
                    name, _, value = line.rpartition(" ")
                    found[name] = found.get(name, 0.0) + float(value)
        return found


def total(counted: dict[str, float], name: str) -> float:
    return sum(value for labelled, value in counted.items() if labelled.partition("{")[0] == name)


def measured(loads: Sequence[str], quick: bool) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Figures, the worst of all loads, and each policy's own by load."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    seen = {load: {policy: PolicyBursts() for policy in (PREEMPT, PARK, DROP)} for load in loads}
    counted: dict[str, float] = {}
    for kv, alike in groupby(loads, lambda load: LOADS[load].kv):
        for metric, value in _played(kv, {name: seen[name] for name in alike}, rounds).items():
            counted[metric] = counted.get(metric, 0.0) + value
    table = {f"{load}, {policy}": one.figures() for load, by in seen.items() for policy, one in by.items()}
    ratios = {
        load: {
            f"{name}_vs_{other}": table[f"{load}, {DROP}"][f"{name}_s"]
            / table[f"{load}, {other}"][f"{name}_s"]
            for other in (PREEMPT, PARK)
            for name in (
                "ttft_p99",
                "ttft_p50",
                "tbt_p50",
                "tbt_p99",
                "tpot_p50",
                "tpot_p99",
                "e2e_p50",
                "burst",
            )
        }
        for load in loads
    }
    table |= ratios
    figures = {name: max(ratios[load][name] for load in loads) for name in ratios[loads[0]]}
    figures["wrong"] = sum(one.wrong for by in seen.values() for one in by.values())
    for name in TIMES:
        seconds, count = (total(counted, f"{name}_{part}") for part in ("sum", "count"))
        figures[name.removeprefix("conserve_split_").removesuffix("econds")] = seconds / max(1.0, count)
    unread = ("_bucket", "_created")
    changes = {name: value for name, value in counted.items() if not any(part in name for part in unread)}
    return figures, {**table, "changes": changes}


def _played(kv: EngineKv, loads: dict[str, dict[str, PolicyBursts]], rounds: int) -> dict[str, float]:
    """Bursts of these loads on engines with so much KV; what the fleet that drops has counted."""
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overload-model-"))) / "model"
        make_model(model, kv.shape)
        fleets = {policy: prepared(policy, kv, model) for policy in (PARK, DROP)}
        plain = BurstSubject(stack.enter_context(plain_engines(fleets[PARK])))
        subjects = {PREEMPT: plain}
        for policy, fleet in fleets.items():
            subjects[policy] = BurstSubject.of_fleet(stack.enter_context(brought_up(fleet)))
        for subject in subjects.values():  # the first drop of all is a warm-up, too
            subject.burst(LOADS[next(iter(loads))].burst(-1), PolicyBursts())
        for load, seen in loads.items():
            for number in range(2 * rounds):
                burst = LOADS[load].burst(number)
                order = list(subjects)[:: -1 if number % 2 else 1]
                said = {policy: subjects[policy].burst(burst, seen[policy]) for policy in order}
                took = ", ".join(f"{policy} {one.seconds[-1]:.1f} s" for policy, one in seen.items())
                took += f"; {seen[DROP].drops} drops so far"
                print(f"{load}, burst {number + 1} of {2 * rounds}: {took}", flush=True)
                right = plain.calm(burst)
                for policy, answers in said.items():
                    seen[policy].wrong += sum(
                        one != wanted
                        for name in right
                        for one, wanted in zip(answers[name], right[name], strict=True)
                    )
        return subjects[DROP].counted()
