"""A week of faults in an hour: agents hold conversations while everything else is killed, stopped or full.

    python -m benchmarks.chaos [--minutes 60] [--seed 0] [--quick] [--json FILE] [--fleet FILE] [--set-clock]
    python -m benchmarks.chaos --drop [--conversations 200] [--minutes 60] [--seed 0] [--json FILE]

The fleet is brought up for it, with co-serving and a batch, and parks after seconds. Faults come at random:
any process but Ray's supervisor is killed; engines, keepers, gateways and the directory are stopped for a
while, or what they send and receive is delayed; the directory, gateways and the batch process cannot write
for a while, as with a full disk. An engine is hit only while all engines serve, else nothing would be left to
serve. With --set-clock, for a machine that nobody else uses, its clock is set an hour forward or back for a
while. Wanted: no conversation lost, no wrong token (float32, greedy, what cut streams showed included), no
request that outlives its limit, nothing left behind, every line of the batch answered once.

With --drop decoders have so little KV that they share their layers again and again (`overload: {policy:
drop}`), and have them again when all agents rest; their processes are killed meanwhile, and clients leave
their streams and ask again. They co-serve a batch, whose iterations may be aborted for turns
(those of the small model take milliseconds: few are worth it).
"""

import asyncio
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Event

import httpx

from benchmarks.chaos.agents import AgentLengths, Agents
from benchmarks.chaos.faults import Fault, faults, inflict
from benchmarks.harness.fleet import brought_up
from benchmarks.harness.output import command, write_json
from benchmarks.overload import live
from deploy.errors import LifecycleError
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import marked
from deploy.lifecycle.status import FleetStatus, fleet_status, serving

ROOT = Path(__file__).parents[2]
MINUTES, QUICK_MINUTES, AGENTS = 60.0, 3.0, 6
EVERY_S = 12.0  # between faults, on average
AT_ONCE = 4
HELD = ("running", "waiting", "conversations", "live_tokens", "parked_tokens")
PARK_AFTER_S, TTL_S = 3.0, 90.0
WHOLE_S, SETTLES_S, BATCH_S = 400.0, 30.0, 400.0
LINES, LINE_TOKENS, LINE_REPEATS = 60, 12, 12
ABORTS_EVERY_S = 4.0
DROP_AGENTS, DROP_CONVERSATIONS, DROP_EVERY_S, DROP_WAIT_S = 16, 200, 20.0, 60.0
# Two engines that end under one request have it set aside for minutes, as they should: the second one is left
# alone until what it took over has ended.
DROP_LEAST_S = 60.0
DROP_LENGTHS = AgentLengths(
    *((40, 60, 80), (96, 160, 200), (0.0, 0.0, 0.0, 6.0)), hang_ups=0.1, busy_s=25.0, rest_s=10.0, apart=True
)
TTFT_S = 0.02  # so little that an iteration with offline work is aborted for a turn
DROP_BLOCKS = 96  # of 32 tokens, on each decoder


@dataclass
class Inflicted:
    """Faults, as they came."""

    home: FleetHome
    random: Random
    coming: Iterator[Fault]
    every_s: float = EVERY_S  # on average, beyond the least
    least_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    over: Event = field(default_factory=Event)

    def run(self, until: float) -> None:
        """What lasts overlaps with what comes next."""
        lasting = list[Future[None]]()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while (left := until - time.monotonic()) > 0:
                pause_s = self.least_s + self.random.expovariate(1 / self.every_s)
                if self.over.wait(min(left, pause_s)):
                    break
                fault = next(self.coming)
                if not fault.on_an_engine or whole(self.home):
                    lasting.append(threads.submit(self._one, fault))
        for one in lasting:
            one.result()

    def _one(self, fault: Fault) -> None:
        pid = inflict(self.home, fault, self.random)
        if pid:
            self.counts[f"{fault.kind} {fault.victim}"] += 1
            print(f"  {time.strftime('%H:%M:%S')} {fault} (pid {pid})", flush=True)


def whole(home: FleetHome) -> bool:
    state = _status(home)
    return state is not None and state.reachable and all(one.phase == "serving" for one in state.engines)


def _status(home: FleetHome) -> FleetStatus | None:
    with suppress(LifecycleError, OSError):
        return fleet_status(home)
    return None


def prepared(file: Path) -> FleetSpec:
    fleet = load_fleet(file)
    talks = fleet.conversation.model_copy(update={"park_after": PARK_AFTER_S, "ttl": TTL_S})
    aborting = {"enabled": True, "ttft": TTFT_S, "tbt": 0.3, "ageing": 20.0}
    coserving = fleet.coserving.model_copy(update=aborting)
    engine = fleet.engine.model_copy(update={"start_together": 2})
    changed = {"name": "chaos", "conversation": talks, "coserving": coserving, "engine": engine}
    return fleet.model_copy(update=changed)


def prepared_to_drop() -> FleetSpec:
    fleet = live.prepared("drop")
    talks = {"park_after": PARK_AFTER_S, "ttl": TTL_S, "decoder_wait": DROP_WAIT_S}
    conversation = fleet.conversation.model_copy(update=talks)
    coserving = fleet.coserving.model_copy(update={"enabled": True, "ttft": TTFT_S, "ageing": 20.0})
    args = {**fleet.engine.args, "num-gpu-blocks-override": DROP_BLOCKS}
    engine = fleet.engine.model_copy(update={"args": args})
    changed = {"name": "chaos", "conversation": conversation, "coserving": coserving, "engine": engine}
    return fleet.model_copy(update=changed)


def changes(home: FleetHome) -> dict[str, float]:
    """What was dropped and restored, and what of it failed, as the directory counts it."""
    state, name = _status(home), "conserve_overload_changes_total{"
    if state is None or not state.metrics:
        return {}
    lines = httpx.get(f"http://{state.metrics}/metrics", timeout=30).text.splitlines()
    found = (line.removeprefix(name).rpartition("} ") for line in lines if line.startswith(name))
    return {labels: float(value) for labels, _, value in found}


class AbortedIterations:
    """Those that engines left at a safepoint, over all their lives: asked for again and again."""

    def __init__(self, home: FleetHome) -> None:
        self._home = home
        self._last: defaultdict[str, float] = defaultdict(float)  # by engine
        self.total = 0.0

    def look(self) -> None:
        state, name = _status(self._home), "conserve_coserving_aborts_total{"
        for one in state.engines if state is not None else ():
            with suppress(httpx.HTTPError):
                lines = httpx.get(f"http://{one.http}/metrics", timeout=30).text.splitlines()
                now = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
                before = self._last[one.engine]
                self.total += now - before if now >= before else now
                self._last[one.engine] = now

    async def run(self) -> None:
        while True:
            await asyncio.gather(asyncio.to_thread(self.look), asyncio.sleep(ABORTS_EVERY_S))


class Batch:
    """Offline work beside: each line is to be answered once, with what it is answered undisturbed."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0, headers={"authorization": "Bearer chaos"})
        self._bodies = [
            {
                "model": model, "prompt": f"Line {number}: the agent " * LINE_REPEATS, "temperature": 0.0,
                "ignore_eos": True, "min_tokens": LINE_TOKENS, "max_tokens": LINE_TOKENS,
            }
            for number in range(LINES)
        ]  # fmt: skip
        self._expected: list[str] = []
        self._batch = ""

    def learn(self) -> None:
        for body in self._bodies:
            answer = self._http.post("/v1/completions", json=body)
            answer.raise_for_status()
            self._expected.append(answer.json()["choices"][0]["text"])

    def submit(self) -> None:
        lines = "\n".join(
            json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
            for number, body in enumerate(self._bodies)
        )
        file = self._http.post("/v1/files", files={"file": ("lines.jsonl", lines)}, data={"purpose": "batch"})
        file.raise_for_status()
        asked = {
            "input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h",
        }  # fmt: skip
        batch = self._http.post("/v1/batches", json=asked)
        batch.raise_for_status()
        self._batch = batch.json()["id"]

    def results(self) -> tuple[list[str], list[str]]:
        """Lines that are missing or failed, and lines that are wrong or there twice."""
        deadline, state = time.monotonic() + BATCH_S, {}
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                state = self._http.get(f"/v1/batches/{self._batch}").raise_for_status().json()
                if state["status"] in ("completed", "failed", "expired", "cancelled"):
                    break
            time.sleep(1)
        if state.get("status") != "completed":
            return [f"the batch is {state.get('status', 'gone')}: {state}"], []
        text = self._http.get(f"/v1/files/{state['output_file_id']}/content").raise_for_status().text
        answers = Counter[str]()
        wrong = []
        for line in map(json.loads, text.splitlines()):
            answers[line["custom_id"]] += 1
            said = line["response"]["body"]["choices"][0]["text"]
            if said != self._expected[int(line["custom_id"])] or answers[line["custom_id"]] > 1:
                wrong.append(f"line {line['custom_id']}: {said!r}")
        return [f"line {number}" for number in range(LINES) if not answers[str(number)]], wrong


def settled(home: FleetHome) -> list[str]:
    """What is not as it should be once the fleet is whole again: what engines hold, and hold for nobody."""
    deadline = time.monotonic() + WHOLE_S
    while not whole(home):
        if time.monotonic() > deadline:
            return [f"not whole after {WHOLE_S:.0f} s: {_status(home)}"]
        time.sleep(1)
    deadline = time.monotonic() + TTL_S + SETTLES_S
    while (left := _held(home)) and time.monotonic() < deadline:
        time.sleep(1)
    return left


def _held(home: FleetHome) -> list[str]:
    state = _status(home)
    if state is None or not state.reachable:
        return ["the directory does not answer"]
    held = []
    for one in state.engines:
        counts = {name: getattr(one, name) for name in HELD}
        held += [f"{one.engine}: {name} {count}" for name, count in counts.items() if count]
    return held


async def play(
    agents: Agents,
    batch: Batch,
    minutes: float,
    inflicted: Inflicted,
    aborted: AbortedIterations,
    at_once: int,
    conversations: float,
) -> None:
    await agents.learn()
    await asyncio.to_thread(batch.learn)
    await asyncio.to_thread(batch.submit)
    print("answers are known; faults begin", flush=True)
    until = time.monotonic() + 60 * minutes
    faults = asyncio.create_task(asyncio.to_thread(inflicted.run, until))
    looking = asyncio.create_task(aborted.run())
    try:
        await agents.run(at_once, until, conversations)
    finally:
        looking.cancel()
        inflicted.over.set()
        await faults


def main() -> None:
    parser = command(__doc__, quick=f"{QUICK_MINUTES:.0f} minutes")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", type=Path, default=ROOT / "configs" / "laptop.yaml")
    parser.add_argument("--set-clock", action="store_true", help="also set this machine's clock")
    parser.add_argument("--drop", action="store_true", help="on decoders that share their layers")
    parser.add_argument("--conversations", type=int, help=f"end after so many; --drop: {DROP_CONVERSATIONS}")
    options = parser.parse_args()
    fleet = prepared_to_drop() if options.drop else prepared(options.fleet)
    random = Random(options.seed)
    coming = faults(random, clock=options.set_clock, only_engines=options.drop)
    conversations = options.conversations or (DROP_CONVERSATIONS if options.drop else float("inf"))
    with brought_up(fleet) as home:
        url = serving(home).endpoint
        agents = Agents(url, fleet.model.name, options.seed, DROP_LENGTHS if options.drop else None)
        batch = Batch(url, fleet.model.name)
        pauses = (DROP_EVERY_S, DROP_LEAST_S) if options.drop else (EVERY_S, 0.0)
        inflicted = Inflicted(home, random, coming, *pauses)
        before = len(marked(home))
        minutes = QUICK_MINUTES if options.quick else options.minutes
        at_once = DROP_AGENTS if options.drop else AGENTS
        aborted = AbortedIterations(home)
        asyncio.run(play(agents, batch, minutes, inflicted, aborted, at_once, conversations))
        print("faults end; the fleet becomes whole", flush=True)
        changed = changes(home)
        left = settled(home)
        aborted.look()
        lost, wrong = batch.results()
        left += [f"{more} processes more" for more in (len(marked(home)) - before,) if more > 0]
    seen = agents.seen
    figures = {
        "lost": len(seen.lost) + len(lost),
        "wrong": len(seen.wrong) + len(wrong),
        "hung": len(seen.hung),
        "leaked": len(left),
        "faults": sum(inflicted.counts.values()),
        "conversations": seen.conversations,
        "turns": seen.turns,
        "longest_turn_s": seen.longest_turn_s,
    }
    print("faults:", dict(inflicted.counts.most_common()))
    print("tries:", dict(seen.tries.most_common()))
    print(f"iterations aborted: {aborted.total:.0f}")
    print("layers:", {change: count for change, count in changed.items() if count})
    for line in (*seen.lost, *lost, *seen.wrong, *wrong, *seen.hung, *left):
        print(f"  {line[:400]}")
    for name, value in figures.items():
        print(f"{name} = {value}")
    counts = {"tries": seen.tries, "by_fault": inflicted.counts, "layers": changed, "aborts": aborted.total}
    write_json(options.json, figures | counts)
    bad = any(figures[name] for name in ("lost", "wrong", "hung", "leaked"))
    sys.exit(1 if bad or not figures["faults"] else 0)


if __name__ == "__main__":
    main()
