"""Malformed requests by the thousand against a live fleet, and an honest conversation beside them.

    python -m benchmarks.fuzz [--requests 100000] [--seed 0] [--quick] [--json FILE] [--fleet FILE]
        [--schemathesis PROGRAM [--schemathesis-seconds 120]]

The fleet is brought up for it. Fields of valid requests are replaced, removed and added, and bytes of valid
ones tampered with; with --schemathesis (`make fuzz` has it) some requests are made from the gateway's
`/openapi.json`. Meanwhile an honest conversation is held over and over: its answers (float32, greedy) have
to be those it had before. Wanted: no engine ended, no request unanswered, no answer of 500, nothing left
behind, the gateway's loop never held for 50 ms of processor time. The longest stall is of GET /health, beside
that of a server that does nothing else: both share two cores with the engines.
"""

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.fuzz.described import Described, described
from benchmarks.fuzz.mutations import Attack, attack
from benchmarks.fuzz.stalls import held, watch
from benchmarks.harness.fleet import brought_up
from benchmarks.harness.output import command, write_json
from deploy.fleet import load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.status import EngineStatus, fleet_status, serving

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "configs" / "co-serving.yaml"
REQUESTS, QUICK_REQUESTS = 100_000, 3_000
CLIENTS = 12
ANSWER_LIMIT_S = 180.0  # of a whole request: its first byte. A long prompt is due after 8 times its length
TAMPERED_LIMIT_S = 0.25  # of one that may not be one
READ_LIMIT_S = 1.0  # of an answer's rest: then the client hangs up
DESCRIBED_S = 120.0
TURNS, TOKENS = 5, 16
SETTLES_S = 20.0
SHOWN = 8


@dataclass
class FuzzResults:
    """What came of it."""

    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    unanswered: list[str] = field(default_factory=list)
    internal: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")  # of whole requests: seconds to its first byte, and what it was
    honest: int = 0
    wrong: int = 0
    described: Described | None = None


async def one(address: tuple[str, int], what: Attack, seen: FuzzResults) -> None:
    """Send it, and read for a while: an honest server answers what is whole, and cuts or refuses the rest."""
    limit = ANSWER_LIMIT_S if what.whole else TAMPERED_LIMIT_S
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), ANSWER_LIMIT_S)
    except (OSError, TimeoutError) as refused:
        seen.unanswered.append(f"{what.about}: no connection ({refused})")
        return
    status, asked = "cut", time.monotonic()
    try:
        writer.write(what.data)
        line = await asyncio.wait_for(reader.readline(), limit)
        took = time.monotonic() - asked
        seen.slowest = max(seen.slowest, (took, f"{what.about}, {len(what.data):,} bytes"))
        status = line[9:12].decode("ascii", "replace") or "cut"
        if status.startswith("5") and status != "503":
            rest = await asyncio.wait_for(reader.read(4096), READ_LIMIT_S)
            seen.internal.append(f"{what.about}: {status} {rest[-300:]!r}")
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(4096), READ_LIMIT_S)
    except TimeoutError:
        status = "waited for more"
        if what.whole:
            seen.unanswered.append(f"{what.about}: {what.data[-300:]!r}")
    except (ConnectionError, ValueError, asyncio.LimitOverrunError):
        pass
    finally:
        seen.answers[status] += 1
        writer.close()
        with suppress(Exception):  # its end is of no interest
            await asyncio.wait_for(writer.wait_closed(), 1)


async def attackers(
    address: tuple[str, int], model: str, requests: int, seed: int, seen: FuzzResults
) -> None:
    async def client(number: int) -> None:
        random = Random(f"{seed} {number}")
        while seen.sent < requests:
            seen.sent += 1
            number_sent = seen.sent
            await one(address, attack(random, model), seen)
            if number_sent % 1000 == 0:
                print(
                    f"  {seen.sent:,} sent, {seen.honest} honest conversations, {seen.wrong} wrong",
                    flush=True,
                )

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


async def honest(http: httpx.AsyncClient, model: str, name: str) -> list[str]:
    """A conversation's answers."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are an agent. " * 40}]
    said = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Step {turn}: {'read and act ' * 20}"})
        body: dict[str, Any] = {
            "model": model, "messages": messages, "max_tokens": TOKENS, "min_tokens": TOKENS,
            "ignore_eos": True, "temperature": 0.0,
        }  # fmt: skip
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-conversation-id": name})
        answer.raise_for_status()
        said.append(str(answer.json()["choices"][0]["message"]["content"]))
        messages.append({"role": "assistant", "content": said[-1]})
    return said


async def beside(url: str, model: str, expected: list[str], seen: FuzzResults, stop: asyncio.Event) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
        while not stop.is_set():
            try:
                said = await honest(http, model, f"honest-{seen.honest}")
            except httpx.HTTPError as failed:
                said = [repr(failed)]
            seen.honest += 1
            if said != expected:
                seen.wrong += 1
                print(f"  an honest conversation differs: {said[-1][:200]!r}", flush=True)


async def run(
    url: str, model: str, requests: int, seed: int, schemathesis: Path | None, seconds: float
) -> FuzzResults:
    seen, stop, split = FuzzResults(), asyncio.Event(), urlsplit(url)
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
        expected = await honest(http, model, "before")
    company = asyncio.create_task(beside(url, model, expected, seen, stop))
    address = str(split.hostname), int(split.port or 80)
    attacking = asyncio.create_task(attackers(address, model, requests, seed, seen))
    if schemathesis is not None:
        seen.described = await asyncio.to_thread(described, schemathesis, url, model, seconds)
    await attacking
    stop.set()
    await company
    return seen


def gateway(url: str) -> psutil.Process:
    port = urlsplit(url).port
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.pid and found.laddr and found.laddr.port == port:
            return psutil.Process(found.pid)
    raise SystemExit(f"nobody listens at {url}")


def settled(home: FleetHome) -> tuple[EngineStatus, ...]:
    """Engines when nothing runs any more, or when that took too long."""
    limit = time.monotonic() + SETTLES_S
    while True:
        engines = fleet_status(home).engines
        if time.monotonic() > limit or not any(one.running or one.waiting for one in engines):
            return engines
        time.sleep(0.5)


def memory_mib(process: psutil.Process) -> float:
    """Of the gateway and of the processes that read bodies for it."""
    return sum(one.memory_info().rss for one in (process, *process.children())) / (1 << 20)


def incarnations(engines: tuple[EngineStatus, ...]) -> dict[str, tuple[int, int]]:
    return {one.engine: (one.pid, one.restarts) for one in engines}


def main() -> None:
    parser = command(__doc__, quick=f"{QUICK_REQUESTS:,} requests")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", type=Path, default=FLEET)
    parser.add_argument("--schemathesis", type=Path, help="its program")
    parser.add_argument("--schemathesis-seconds", type=float, default=DESCRIBED_S, metavar="SECONDS")
    options = parser.parse_args()
    requests = QUICK_REQUESTS if options.quick else options.requests
    fleet = load_fleet(options.fleet)
    with brought_up(fleet) as home:
        url = serving(home).endpoint
        before, process = fleet_status(home).engines, gateway(url)
        theirs, ours = get_context("spawn").Pipe()
        prober = get_context("spawn").Process(target=watch, args=(url, theirs), daemon=True)
        prober.start()
        files, memory, held_before = process.num_fds(), memory_mib(process), held(url)
        began = time.monotonic()
        theirs_too = options.schemathesis, options.schemathesis_seconds
        seen = asyncio.run(run(url, fleet.model.name, requests, options.seed, *theirs_too))
        seconds = time.monotonic() - began
        stalls = _stalls(ours, prober)
        held_after, after = held(url), settled(home)
        figures = {
            "requests": seen.sent,
            "described_requests": seen.described.requests if seen.described else 0,
            "described_failed": int(bool(seen.described and seen.described.failed)),
            "described_unmade": seen.described.unmade if seen.described else 0,
            "requests_per_s": round(seen.sent / seconds, 1),
            "engines_ended": sum(
                incarnations(before)[name] != now for name, now in incarnations(after).items()
            ),
            "unanswered": len(seen.unanswered),
            "slowest_answer_s": round(seen.slowest[0], 1),
            "internal_errors": len(seen.internal),
            "honest_conversations": seen.honest,
            "wrong": seen.wrong,
            "left_running": sum(one.running + one.waiting for one in after),
            "left_files": max(0, process.num_fds() - files - CLIENTS),
            "memory_mib": round(memory_mib(process), 1),
            "memory_mib_before": round(memory, 1),
            "loop_held_over_50_ms": held_after - held_before,
            **stalls,
        }
    print("answers:", dict(seen.answers.most_common()))
    if seen.described is not None and seen.described.failed:
        print(seen.described.said)
    print("slowest answer:", seen.slowest[1])
    for line in (*seen.unanswered[:SHOWN], *seen.internal[:SHOWN]):
        print(f"  {line}")
    for name, value in figures.items():
        print(f"{name} = {value}")
    write_json(options.json, figures)
    bad = (
        *("engines_ended", "unanswered", "internal_errors", "wrong", "left_running", "left_files"),
        *("described_failed", "loop_held_over_50_ms"),
    )
    sys.exit(1 if any(figures[name] for name in bad) else 0)


def _stalls(pipe: Connection, prober: Any) -> dict[str, float]:
    pipe.send(None)
    found: dict[str, float] = pipe.recv() if pipe.poll(10) else {}
    prober.join(5)
    return found


if __name__ == "__main__":
    main()
