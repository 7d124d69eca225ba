"""What the validation of a large batch costs interactive turns: first tokens alone and beside it, by turns.

    python -m benchmarks.batch --validation [--quick] [--json FILE] [--lines 1000000]

No vLLM: a fake engine that streams, a directory, the whole gateway and the batch process, each a process of
its own. The file is uploaded once. Then phases take turns: agents alone, and agents beside a batch that is
validated, which is cancelled when the phase is over. Before each phase the batch process has come to rest.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.output import quantile
from benchmarks.relay import subjects
from benchmarks.relay.client import API_KEY, Asker, Load, Tally, requests_of
from benchmarks.relay.subjects import Subject
from workers.processes import free_port

AGENTS = 12
THINK_S = 0.1
TOKENS, RATE = 16, 40
REST_SHARE = 0.05  # of a processor: a process that takes less is at rest
URL = "/v1/chat/completions"


def started(work: Path) -> dict[str, Subject]:
    """Everything that runs, by name; ready."""
    engine = subjects.engine()
    directory = subjects.directory(engine.port, work)
    gateway = subjects.our_gateway(directory.port, work)
    batch = Subject("batch", [], free_port(subjects.HOST), ready_path="/metrics")
    address = f"127.0.0.1:{directory.port}"
    of_gateway = json.loads((work / "gateway.json").read_text())
    of_gateway |= {"batch": {"http": f"127.0.0.1:{batch.port}", "key": subjects.SECRET}}
    (work / "gateway.json").write_text(json.dumps(of_gateway))
    of_batch = {
        "store_url": f"sqlite:///{work / 'batch.sqlite'}",
        "files_url": str(work / "files"),
        "models": [{"name": "m"}],
        "directory": address,
        "secret": subjects.SECRET,
        "key": subjects.SECRET,
        "port": batch.port,
    }
    (work / "batch.json").write_text(json.dumps(of_batch))
    batch.command = [sys.executable, "-m", "router.batch", "--config", str(work / "batch.json")]
    everything = {"engine": engine, "directory": directory, "gateway": gateway, "batch": batch}
    for name, subject in everything.items():
        subject.start(work / f"{name}.log", set(range(64)))
        if name != "directory" and not subject.wait_until_ready():
            raise SystemExit(f"{name} did not start: {(work / f'{name}.log').read_text()[-2000:]}")
    return everything


async def form(lines: int) -> AsyncIterator[bytes]:
    yield b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    for start in range(0, lines, 500):
        numbers = range(start, min(start + 500, lines))
        yield b"".join(json.dumps(line(number)).encode() + b"\n" for number in numbers)
    yield b"\r\n--b--\r\n"


def line(number: int) -> dict[str, Any]:
    prompt = f"Request {number}. " + "Say something about it. " * (number % 20)
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
    return {"custom_id": f"r{number}", "method": "POST", "url": URL, "body": body}


async def talk(port: int, seconds: float) -> Tally:
    """Agents ask one streamed turn after another."""
    load, tally = Load(port, 1, TOKENS, RATE, prompt_bytes=512, fresh=True), Tally()
    until = time.monotonic() + seconds
    loop = asyncio.get_running_loop()

    async def agent(number: int) -> None:
        requests = requests_of(load, number)
        while time.monotonic() < until:
            await asyncio.sleep(random.expovariate(1 / THINK_S))
            make = lambda: Asker(load, tally, requests, until)  # noqa: E731
            _, asker = await loop.create_connection(make, "127.0.0.1", port)
            await asker.done

    async with asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(agent(number))
    return tally


async def at_rest(process: Subject) -> None:
    while True:
        before = process.cpu_seconds()
        await asyncio.sleep(1.0)
        if process.cpu_seconds() - before < REST_SHARE:
            return


async def measure(lines: int, rounds: int, seconds: float, work: Path) -> dict[str, Any]:
    everything = started(work)
    gateway, batch = everything["gateway"], everything["batch"]
    first: dict[str, list[list[float]]] = {"alone": [], "validating": []}
    validated: list[float] = []
    headers = {"authorization": f"Bearer {API_KEY}"}
    try:
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as http:
            kind = {"content-type": "multipart/form-data; boundary=b"}
            uploaded = (await http.post("/files", content=form(lines), headers=kind)).json()
            print(f"uploaded {lines} lines, {uploaded['bytes'] >> 20} MiB", flush=True)
            wanted = {"input_file_id": uploaded["id"], "endpoint": URL, "completion_window": "24h"}
            await talk(gateway.port, 3.0)
            for number in range(rounds):
                for phase in ("alone", "validating") if number % 2 == 0 else ("validating", "alone"):
                    await at_rest(batch)
                    submitted = None
                    if phase == "validating":
                        submitted = (await http.post("/batches", json=wanted)).json()
                    used = batch.cpu_seconds()
                    tally = await talk(gateway.port, seconds)
                    assert not tally.errors, tally.errors[0]
                    first[phase].append(tally.first_token_s)
                    if submitted is not None:
                        validated.append((batch.cpu_seconds() - used) / seconds)
                        shown = (await http.get(f"/batches/{submitted['id']}")).json()
                        assert shown["status"] == "validating", f"{shown['status']}: more lines are needed"
                        await http.post(f"/batches/{submitted['id']}/cancel")
                    p99 = quantile(tally.first_token_s, 0.99)
                    print(f"round {number + 1} of {rounds}: {phase} p99 {p99 * 1e3:.1f} ms", flush=True)
    finally:
        for subject in everything.values():
            subject.stop()
    return figures(first, validated, lines)


def figures(first: dict[str, list[list[float]]], validated: list[float], lines: int) -> dict[str, Any]:
    everything = {phase: [value for one in rounds for value in one] for phase, rounds in first.items()}
    pairs = zip(first["alone"], first["validating"], strict=True)
    ratios = [quantile(beside, 0.99) / quantile(alone, 0.99) for alone, beside in pairs]
    return {
        "lines": lines,
        "turns": {phase: len(values) for phase, values in everything.items()},
        "first_token_p50_s": {phase: quantile(values, 0.5) for phase, values in everything.items()},
        "first_token_p99_s": {phase: quantile(values, 0.99) for phase, values in everything.items()},
        "p99_ratio": quantile(everything["validating"], 0.99) / quantile(everything["alone"], 0.99),
        "p99_ratio_by_round": ratios,
        "p99_ratio_median_of_rounds": statistics.median(ratios),
        "processors_of_validation": statistics.mean(validated),
    }


def main(options: argparse.Namespace) -> dict[str, Any]:
    lines, rounds, seconds = (120_000, 2, 3.0) if options.quick else (options.lines, 6, 15.0)
    with tempfile.TemporaryDirectory(prefix="conserve-validation-") as work:
        found: dict[str, Any] = uvloop.run(measure(lines, rounds, seconds, Path(work)))
    for name, value in found.items():
        print(name, json.dumps(value))
    return found
