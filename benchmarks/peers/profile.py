"""Computes a profile of each engine during a play from the events of `engine_probe`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.peers.engine_probe import LOAD, MODEL, SAMPLE, SCHEDULE, STORE, UPDATE, WAIT, ProbeEvent

SIZES = (8, 64, 256, 1024)  # most tokens of an iteration of each size; a last size has more tokens
WAITS_S = 0.002  # a shorter look into the request queue counts as part of a step


@dataclass(frozen=True)
class EngineProfileRow:
    """Profile of one engine in a part of a play. Times are shares of that part, except `seconds`."""

    contender: str
    play: str
    engine: str
    seconds: float  # duration of the part
    iterations: int
    tokens: int
    with_prompts: int  # iterations that compute prompt tokens
    prompt_tokens_each: float  # mean prompt tokens of these iterations
    by_size: tuple[int, ...]  # iterations of up to `SIZES` tokens, and of more
    model: float
    model_cpu: float
    scheduling: float
    copies_cpu: float  # of blocks to the host
    restores_cpu: float
    waiting: float  # without any request
    other: float  # rest of the engine core's loop, including waits for a processor


@dataclass(frozen=True)
class IterationCost:
    """CPU time of one iteration of the model: a constant, and costs per decode and per prompt token."""

    constant_s: float
    decode_s: float
    prompt_token_s: float


def events(folder: Path, pids: Iterable[int]) -> list[ProbeEvent]:
    """Return the events that these processes have written so far, in order of time."""
    found = []
    for pid in pids:
        file = folder / f"{pid}.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        found += [ProbeEvent(**json.loads(line)) for line in lines]
    return sorted(found, key=lambda one: one.at)


def processes_of(urls: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the processes of each engine: the one that listens at its address, and its descendants."""
    ports = {urlsplit(url).port: engine for engine, url in urls.items()}
    found: dict[str, list[int]] = {}
    for one in psutil.net_connections("tcp"):
        if one.status != psutil.CONN_LISTEN or one.pid is None or not one.laddr:
            continue
        if engine := ports.get(one.laddr.port):
            server = psutil.Process(one.pid)
            found[engine] = [server.pid, *(child.pid for child in server.children(recursive=True))]
    return found


def row(
    contender: str, play: str, engine: str, found: Sequence[ProbeEvent], begin: float, end: float
) -> EngineProfileRow:
    """Return an engine's profile of the time from `begin` to `end`, computed from its events."""
    within = [one for one in found if begin <= one.at <= end]
    iterations = [one for one in within if one.kind == SCHEDULE and one.decodes + one.prompts]
    sizes = [one.decodes + one.prompt_tokens for one in iterations]
    prompts = [one.prompt_tokens for one in iterations if one.prompts]
    seconds = end - begin

    def share(*kinds: str, cpu: bool = False) -> float:
        spent = (
            one.cpu_s if cpu else min(one.seconds, one.at - begin) for one in within if one.kind in kinds
        )
        return round(sum(spent) / seconds, 4)

    waited = [one for one in found if one.kind == WAIT and one.seconds > WAITS_S]
    # A wait that is not over at `end` is written only later, so its overlap counts.
    waiting = sum(max(0.0, min(end, one.at) - max(begin, one.at - one.seconds)) for one in waited) / seconds
    model, scheduling = share(MODEL, SAMPLE), share(SCHEDULE, UPDATE)
    classes = np.searchsorted(SIZES, sizes) if sizes else np.zeros(0, dtype=int)
    return EngineProfileRow(
        *(contender, play, engine, round(seconds, 1)),
        iterations=len(iterations),
        tokens=sum(sizes),
        with_prompts=len(prompts),
        prompt_tokens_each=round(float(np.mean(prompts)), 1) if prompts else 0.0,
        by_size=tuple(int(count) for count in np.bincount(classes, minlength=len(SIZES) + 1)),
        model=model,
        model_cpu=share(MODEL, SAMPLE, cpu=True),
        scheduling=scheduling,
        copies_cpu=share(STORE, cpu=True),
        restores_cpu=share(LOAD, cpu=True),
        waiting=round(waiting, 4),
        other=round(max(0.0, 1 - model - scheduling - waiting), 4),
    )


def cost(engines: Iterable[Sequence[ProbeEvent]]) -> IterationCost:
    """Return the cost of an iteration, fitted to all iterations that engines ran since their start.

    Iterations run in the order in which they are scheduled, even if one is scheduled while another runs.
    """
    terms: list[tuple[float, float, float]] = []
    seconds: list[float] = []
    for found in engines:
        scheduled = [one for one in found if one.kind == SCHEDULE]
        ran = [one for one in found if one.kind == MODEL]
        for what, how in zip(scheduled, ran, strict=False):
            if what.decodes + what.prompts:
                terms.append((1.0, float(what.decodes), float(what.prompt_tokens)))
                seconds.append(how.cpu_s)
    if len(terms) < 3:
        return IterationCost(0.0, 0.0, 0.0)
    constant, decode, prompt = np.linalg.lstsq(np.asarray(terms), np.asarray(seconds), rcond=None)[0]
    return IterationCost(float(constant), float(decode), float(prompt))
