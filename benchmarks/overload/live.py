"""The same bursts on plain vLLM, on a fleet that parks only, and on one whose decoders share layers: one run.

Two engines with little KV each, and more turns at once than fit; on plain vLLM, which preempts, turns go to
the two by turns. All three take turns, forwards and back, after a warm-up in which the answers of calm times
are noted: what differs from them is wrong.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import httpx

from benchmarks.live_policies import brought_up
from benchmarks.peers.contenders import Bench, PlainEngines
from benchmarks.prefixes import words, words_of
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import fleet_status, serving
from deploy.small_model import make_model
from traces.simulator.metrics import percentile

FLEET = Path(__file__).parents[2] / "configs" / "laptop.yaml"
PREEMPT, PARK, DROP = "preempt", "park", "drop"
BLOCK, BLOCKS, CONTEXT = 32, 128, 2_048  # 4,096 tokens of KV on each decoder
TURNS, PROMPT, ANSWER = 12, 800, 200  # 1.5 times what both have
CALM = 4
ROUNDS, QUICK_ROUNDS = 4, 1  # each is all three, forwards and back
LIMIT_S, START_S = 400.0, 600.0
# For the first two an engine stands still; while parameters return it serves.
TIMES = tuple(f"conserve_split_{what}_seconds" for what in ("drop", "restore", "return"))


@dataclass
class Bursts:
    """What one policy saw."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each burst
    wrong: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "ttft_p50_s": median(self.ttft_s),
            "ttft_p99_s": percentile(self.ttft_s, 99),
            "tbt_p50_s": median(self.gaps_s),
            "tbt_p99_s": percentile(self.gaps_s, 99),
            "burst_s": median(self.seconds),
            "burst_least_s": min(self.seconds),
            "burst_most_s": max(self.seconds),
            "tokens_per_s": TURNS * ANSWER / median(self.seconds),
        }


def prepared(policy: str) -> FleetSpec:
    content = load_fleet(FLEET).model_dump(mode="json", exclude_unset=True)
    content |= {"name": f"live-{policy}", "policy": "collocated", "overload": {"policy": policy}}
    content["model"]["max_context"] = CONTEXT
    content["engine"]["args"] |= {"num-gpu-blocks-override": BLOCKS, "block-size": BLOCK}
    content["engine"]["start_together"] = 2
    content["tiers"] = [{"name": "mixed", "role": "mixed", "replicas": 2}]
    content["conversation"] |= {"headroom_tokens": ANSWER, "decoder_wait": f"{LIMIT_S:.0f}s"}
    content["coserving"] = {"tbt": "10s"}  # a plan is not refused for what two busy cores take
    return FleetSpec.model_validate(content)


@contextmanager
def plain_engines(fleet: FleetSpec) -> Iterator[list[str]]:
    """vLLM with the options of the fleet's engines, as many as it has."""
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        work = Path(folder)
        make_model(work / "model")
        (work / "home").mkdir()
        model = fleet.model.model_copy(update={"path": str(work / "model")})
        bench = Bench(fleet.model_copy(update={"model": model}), work, None, START_S)
        with PlainEngines(bench) as engines:
            yield engines.urls()


class BurstSubject:
    """What bursts are played on: a fleet, or engines without one."""

    def __init__(self, urls: Sequence[str], model: str, home: FleetHome | None = None) -> None:
        self._urls, self._model, self._home = urls, model, home
        self._words = words_of(urls[0], model, PROMPT)
        self._right: list[str] = []
        self._number = 0

    @classmethod
    def of_fleet(cls, home: FleetHome, model: str) -> "BurstSubject":
        return cls([serving(home).endpoint], model, home)

    async def calm(self) -> None:
        """Notes the answers; so few at a time that nothing gives way."""
        for first in range(0, TURNS, CALM):
            self._right += await self._turns(range(first, first + CALM), Bursts())

    async def burst(self, seen: Bursts) -> None:
        began = time.monotonic()
        said = await self._turns(range(TURNS), seen)
        seen.seconds.append(time.monotonic() - began)
        seen.wrong += sum(one != right for one, right in zip(said, self._right, strict=True))

    async def _turns(self, numbers: Sequence[int], seen: Bursts) -> list[str]:
        self._number += 1
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            name = f"burst-{self._number}"
            said = await asyncio.gather(*(self._turn(http, f"{name}-{n}", n, seen) for n in numbers))
            if self._home is not None:
                for n in numbers:
                    await http.delete(f"{self._urls[0]}/v1/conversations/{name}-{n}")
        return list(said)

    async def _turn(self, http: httpx.AsyncClient, name: str, number: int, seen: Bursts) -> str:
        body = {
            "model": self._model, "temperature": 0.0, "stream": True, "ignore_eos": True,
            "max_tokens": ANSWER, "min_tokens": ANSWER,
            "messages": [{"role": "user", "content": words(Random(number), self._words)}],
        }  # fmt: skip
        began, last, text = time.monotonic(), 0.0, ""
        headers = {"x-conversation-id": name}
        url = f"{self._urls[number % len(self._urls)]}/v1/chat/completions"
        async with http.stream("POST", url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise SystemExit(f"{name}: {chunk['error']}")
                for choice in chunk["choices"]:
                    now = time.monotonic()
                    if last:
                        seen.gaps_s.append(now - last)
                    elif choice["delta"].get("content"):
                        seen.ttft_s.append(now - began)
                    if choice["delta"].get("content"):
                        last, text = now, text + choice["delta"]["content"]
        return text

    def counted(self) -> dict[str, float]:
        """Of the directory and of engines, by name and labels."""
        assert self._home is not None
        status = fleet_status(self._home)
        pages = [status.metrics, *(engine.http for engine in status.engines)]
        found: dict[str, float] = {}
        for page in pages:
            for line in httpx.get(f"http://{page}/metrics", timeout=30).text.splitlines():
                if line.startswith(("conserve_overload_changes_total{", "conserve_split")):
                    name, _, value = line.rpartition(" ")
                    found[name] = found.get(name, 0.0) + float(value)
        return found


def measured(quick: bool) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Figures, and each policy's own."""
    seen = {policy: Bursts() for policy in (PREEMPT, PARK, DROP)}
    with ExitStack() as stack:
        model = "small"
        subjects = {PREEMPT: BurstSubject(stack.enter_context(plain_engines(prepared(PARK))), model)}
        for policy in (PARK, DROP):
            home = stack.enter_context(brought_up(prepared(policy)))
            subjects[policy] = BurstSubject.of_fleet(home, model)
        for subject in subjects.values():
            asyncio.run(subject.calm())
            asyncio.run(subject.burst(Bursts()))  # the first drop of all is a warm-up, too
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for policy in (*subjects, *reversed(subjects)):
                asyncio.run(subjects[policy].burst(seen[policy]))
        counted = subjects[DROP].counted()
    found = {policy: one.figures() for policy, one in seen.items()}
    figures = {
        f"{name}_vs_{other}": found[DROP][f"{name}{unit}"] / found[other][f"{name}{unit}"]
        for other in (PREEMPT, PARK)
        for name, unit in (
            *(("ttft_p99", "_s"), ("ttft_p50", "_s"), ("tbt_p50", "_s"), ("tbt_p99", "_s")),
            *(("burst", "_s"), ("tokens_per_s", "")),
        )
    }
    figures["wrong"] = sum(one.wrong for one in seen.values())
    for name in TIMES:
        total, count = (sum(_with(counted, f"{name}_{part}")) for part in ("sum", "count"))
        figures[name.removeprefix("conserve_split_").removesuffix("econds")] = total / max(1.0, count)
    unread = ("_bucket", "_created")
    changes = {name: value for name, value in counted.items() if not any(part in name for part in unread)}
    return figures, {**found, "changes": changes}


def _with(counted: dict[str, float], name: str) -> Iterator[float]:
    return (value for labelled, value in counted.items() if labelled.startswith(name + "{"))
