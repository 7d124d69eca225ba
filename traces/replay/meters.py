"""Counters of the fleet before and after, from its Prometheus pages: transfers, recomputed tokens, joules."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from traces.replay.results import MeterReading

PREFIXES = ("conserve_", "vllm:")
JOULES = "conserve_energy_joules_total"
TIMEOUT = aiohttp.ClientTimeout(total=10.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    counters: dict[str, float]  # summed over labels and pages
    unread: tuple[str, ...]


async def read(session: aiohttp.ClientSession, urls: Sequence[str]) -> Snapshot:
    pages = await asyncio.gather(*(_page(session, url) for url in urls))
    counters: dict[str, float] = {}
    unread: list[str] = []
    for url, (page, problem) in zip(urls, pages, strict=True):
        if problem:
            unread.append(f"{url}: {problem}")
            continue
        for name, value in _counters(page).items():
            counters[name] = counters.get(name, 0.0) + value
    return Snapshot(counters, tuple(unread))


async def _page(session: aiohttp.ClientSession, url: str) -> tuple[str, str]:
    try:
        async with session.get(url, timeout=TIMEOUT) as response:
            if response.status != 200:
                return "", f"HTTP {response.status}"
            return await response.text(), ""
    except (aiohttp.ClientError, TimeoutError) as error:
        return "", f"{type(error).__name__}: {error}"


def _counters(page: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        if family.type not in ("counter", "histogram", "summary") or not family.name.startswith(PREFIXES):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_total", "_sum", "_count")):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def between(before: Snapshot, after: Snapshot) -> MeterReading:
    """What was counted in between. A counter that fell was restarted: what it says now is all one knows."""
    grown: dict[str, float] = {}
    for name, value in after.counters.items():
        earlier = before.counters.get(name, 0.0)
        grown[name] = value - earlier if value >= earlier else value
    unread = tuple(dict.fromkeys((*before.unread, *after.unread)))
    return MeterReading(
        {name: grown[name] for name in sorted(grown) if grown[name]}, grown.get(JOULES), unread
    )
