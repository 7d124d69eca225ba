"""Send thousands of malformed requests to a live fleet, and beside them hold an honest conversation.

    python -m tests.fuzz [--requests 100000] [--seed 0] [--quick] [--json FILE] [--fleet FILE]
        [--schemathesis PROGRAM [--schemathesis-seconds 120]]

Fields of valid requests are replaced, removed and added, and bytes of valid requests are changed. With
--schemathesis, which `make fuzz` passes, more requests are made from the gateway's `/openapi.json`. Meanwhile
an honest conversation is repeated, and its answers (float32, greedy) must stay the same.

No engine may end or take more than 1.5 times its idle memory. No request may stay unanswered, no answer may
be a 500, and no request or open file may be left. The gateway's event loop may never be blocked for 50 ms of
processor time. The longest wait for GET /health is printed beside the longest wait for an idle server: both
share two cores with the engines.
"""

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from benchmarks.harness.chats import converse
from benchmarks.harness.fleet import CO_SERVING, brought_up
from benchmarks.harness.memory_watch import MEMORY_AIM, MemoryOfEngines
from benchmarks.harness.output import command, report
from benchmarks.harness.processes import received, spawned
from deploy.fleet import load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import EngineStatus, fleet_status, serving
from tests.fuzz.described import Described, described
from tests.fuzz.mutations import Attack, attack
from tests.fuzz.stalls import long_holds, watch
from traces import ReplayError
from traces.replay.client import ChatClient, ReplayOptions

REQUESTS, QUICK_REQUESTS = 100_000, 3_000
CLIENTS = 12
ANSWER_LIMIT_S = 180.0  # until the first byte of an answer; a long prompt may wait for 8 times its duration
TAMPERED_LIMIT_S = 0.25  # until the first byte of the answer to a request that may be invalid
READ_LIMIT_S = 1.0  # for the rest of an answer, after which the client hangs up
DESCRIBED_S = 120.0
TURNS, TOKENS = 5, 16
SETTLE_S = 20.0
SHOWN = 8
FAULTS = (
    *("engines_ended", "unanswered", "internal_errors", "wrong", "left_running", "left_files"),
    *("described_failed", "loop_held_over_50_ms", "engine_memory_over"),
)


@dataclass
class FuzzResults:
    """Counts of answers to malformed requests, and of honest conversations: all, and the wrong ones."""

    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    internal: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")  # seconds to the first byte, and the request
    honest: int = 0
    wrong: int = 0
    described: Described | None = None


async def send(address: tuple[str, int], request: Attack, seen: FuzzResults) -> None:
    """Send a request, and record its answer. A whole request (`Attack.whole`) must get an answer."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), ANSWER_LIMIT_S)
    except (OSError, TimeoutError) as refused:
        seen.unanswered.append(f"{request.about}: no connection ({refused})")
        return
    status, began = "cut", time.monotonic()
    try:
        writer.write(request.data)
        limit = ANSWER_LIMIT_S if request.whole else TAMPERED_LIMIT_S
        line = await asyncio.wait_for(reader.readline(), limit)
        about = f"{request.about}, {len(request.data):,} bytes"
        seen.slowest = max(seen.slowest, (time.monotonic() - began, about))
        status = line[9:12].decode("ascii", "replace") or "cut"
        if status.startswith("5") and status != "503":
            rest = await asyncio.wait_for(reader.read(4096), READ_LIMIT_S)
            seen.internal.append(f"{request.about}: {status} {rest[-300:]!r}")
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(4096), READ_LIMIT_S)
    except TimeoutError:
        status = "waited for more"
        if request.whole:
            seen.unanswered.append(f"{request.about}: {request.data[-300:]!r}")
    except (ConnectionError, ValueError, asyncio.LimitOverrunError):
        pass
    finally:
        seen.answers[status] += 1
        writer.close()
        with suppress(Exception):  # how the connection closes does not matter
            await asyncio.wait_for(writer.wait_closed(), 1)


async def attackers(
    address: tuple[str, int], model: str, requests: int, seed: int, seen: FuzzResults
) -> None:
    async def client(number: int) -> None:
        random = Random(f"{seed} {number}")
        while seen.sent < requests:
            seen.sent += 1
            if seen.sent % 1000 == 0:
                honest = f"{seen.honest} honest conversations, {seen.wrong} wrong"
                print(f"  {seen.sent:,} sent, {honest}", flush=True)
            await send(address, attack(random, model), seen)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


async def honest(chat: ChatClient, name: str) -> list[str]:
    """Hold one honest conversation, and return the answers to its turns."""
    contents = (f"Step {turn}: {'read and act ' * (80 if turn == 0 else 20)}" for turn in range(TURNS))
    return [answer.text async for _, answer in converse(chat, contents, TOKENS, name)]


async def run(
    url: str,
    memory: MemoryOfEngines,
    model: str,
    requests: int,
    seed: int,
    schemathesis: Path | None,
    seconds: float,
) -> FuzzResults:
    seen, stop, split = FuzzResults(), asyncio.Event(), urlsplit(url)
    looking = asyncio.create_task(memory.run())
    async with aiohttp.ClientSession() as session:
        chat = ChatClient(session, ReplayOptions(url, conversation_header="x-conversation-id"), model)
        expected = await honest(chat, "before")

        async def repeat_honest() -> None:
            while not stop.is_set():
                try:
                    answers = await honest(chat, f"honest-{seen.honest}")
                except ReplayError as failed:
                    answers = [repr(failed)]
                seen.honest += 1
                if answers != expected:
                    seen.wrong += 1
                    print(f"  an honest conversation differs: {answers[-1][:200]!r}", flush=True)

        beside = asyncio.create_task(repeat_honest())
        address = str(split.hostname), int(split.port or 80)
        attacking = asyncio.create_task(attackers(address, model, requests, seed, seen))
        if schemathesis is not None:
            seen.described = await asyncio.to_thread(described, schemathesis, url, model, seconds)
        await attacking
        stop.set()
        await beside
    looking.cancel()
    return seen


def listener(url: str) -> psutil.Process:
    """Return the process that listens at the URL's port."""
    port = urlsplit(url).port
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.pid and found.laddr and found.laddr.port == port:
            return psutil.Process(found.pid)
    raise SystemExit(f"no process listens at {url}")


def settled(home: FleetHome) -> tuple[EngineStatus, ...]:
    """Wait until no request runs, for at most `SETTLE_S`, and return the status of each engine."""
    limit = time.monotonic() + SETTLE_S
    while True:
        engines = fleet_status(home).engines
        if time.monotonic() > limit or not any(one.running or one.waiting for one in engines):
            return engines
        time.sleep(0.5)


def memory_mib(process: psutil.Process) -> float:
    """Return the memory in MiB of the gateway `process` and of its parser processes."""
    return sum(one.memory_info().rss for one in (process, *process.children())) / (1 << 20)


def measure(
    url: str, home: FleetHome, run_arguments: tuple[Any, ...]
) -> tuple[FuzzResults, dict[str, float]]:
    """Send malformed requests to the fleet; return the results, and figures for the report."""
    before, process = fleet_status(home).engines, listener(url)
    engines = MemoryOfEngines(home)
    with spawned(watch, url) as prober:
        files, memory, holds = process.num_fds(), memory_mib(process), long_holds(url)
        began = time.monotonic()
        seen = asyncio.run(run(url, engines, *run_arguments))
        seconds = time.monotonic() - began
        prober.send(None)
        stalls: dict[str, float] = received(prober)
    holds_after, after = long_holds(url), settled(home)
    processes = {one.engine: (one.pid, one.restarts) for one in before}
    described = seen.described or Described(0, False, 0, "")
    return seen, {
        "requests": seen.sent,
        "described_requests": described.requests,
        "described_failed": int(described.failed),
        "described_unmade": described.unmade,
        "requests_per_s": round(seen.sent / seconds, 1),
        "engines_ended": sum(processes[one.engine] != (one.pid, one.restarts) for one in after),
        "unanswered": len(seen.unanswered),
        "slowest_answer_s": round(seen.slowest[0], 1),
        "internal_errors": len(seen.internal),
        "honest_conversations": seen.honest,
        "wrong": seen.wrong,
        "left_running": sum(one.running + one.waiting for one in after),
        "left_files": max(0, process.num_fds() - files - CLIENTS),
        "memory_mib": round(memory_mib(process), 1),
        "memory_mib_before": round(memory, 1),
        "engine_memory_vs_idle": round(engines.most, 2),
        "engine_memory_over": int(engines.most > MEMORY_AIM),
        "loop_held_over_50_ms": holds_after - holds,
        **stalls,
    }


def main() -> None:
    parser = command(__doc__, f"{QUICK_REQUESTS:,} requests", CO_SERVING, seed=0)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--schemathesis", type=Path, help="path of the program")
    parser.add_argument("--schemathesis-seconds", type=float, default=DESCRIBED_S, metavar="SECONDS")
    options = parser.parse_args()
    requests, fleet = QUICK_REQUESTS if options.quick else options.requests, load_fleet(options.fleet)
    arguments = (fleet.model.name, requests, options.seed, options.schemathesis, options.schemathesis_seconds)
    with brought_up(fleet) as home:
        seen, figures = measure(serving(home).endpoint, home, arguments)
    print("answers:", dict(seen.answers.most_common()))
    if seen.described is not None and seen.described.failed:
        print(seen.described.output)
    print("slowest answer:", seen.slowest[1])
    for line in (*seen.unanswered[:SHOWN], *seen.internal[:SHOWN]):
        print(f"  {line}")
    report(options.json, figures)
    sys.exit(1 if any(figures[name] for name in FAULTS) else 0)


if __name__ == "__main__":
    main()
