"""Two decoders that a burst fills share their layers, and have whole models again after the burst.

A killed decoder leaves the other one with the whole model. No answer differs from an undisturbed one.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.streams import ChatStream
from tests.fleet.talk import metric, opening
from tests.fleet.test_faults import vllm_process
from tests.support.fleet import RunningFleet, fleet_up

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(900)]

BLOCKS = 80  # of 32 tokens, on each engine
STREAMS = 12
TOKENS = 400  # a burst lasts for seconds after overload is declared
STREAM_S = 240


def small_decoders(content: Any) -> None:
    content["policy"] = "collocated"
    content["model"]["max_context"] = 2048
    content["engine"]["args"] |= {"num-gpu-blocks-override": BLOCKS, "max-num-batched-tokens": 512}
    content["tiers"] = [{"name": "mixed", "role": "mixed", "replicas": 2}]
    content["conversation"] |= {"headroom_tokens": TOKENS, "decoder_wait": "4m"}
    content["coserving"] = {"tbt": "10s"}  # whatever this machine's cores are busy with
    content["overload"] = {"policy": "drop"}


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    with fleet_up("random", small_decoders) as up:
        yield up


def start(fleet: RunningFleet, number: int, key: str) -> ChatStream:
    return ChatStream(fleet.url, fleet.model, opening(9000 + number, 6), f"{key}-{number}", TOKENS)


def burst(fleet: RunningFleet, key: str) -> list[ChatStream]:
    return [start(fleet, number, key) for number in range(STREAMS)]


def texts(streams: list[ChatStream]) -> list[str]:
    for stream in streams:
        stream.end(STREAM_S)
        assert stream.finished and stream.error is None, (stream.status, stream.error, stream.broken)
    return [stream.text for stream in streams]


@pytest.fixture(scope="module")
def right(fleet: RunningFleet) -> list[str]:
    """Return the correct answers: those of a fleet without overload, with two conversations at a time."""
    said: list[str] = []
    for first in range(0, STREAMS, 2):
        said += texts([start(fleet, number, "calm") for number in (first, first + 1)])
    assert changes(fleet, "drop") == 0
    return said


def changes(fleet: RunningFleet, change: str) -> float:
    return changes_at(f"http://{fleet.status()['metrics']}", change)


def changes_at(page: str, change: str) -> float:
    return metric(page, "conserve_overload_changes_total", change=change, outcome="done")


def test_two_decoders_share_layers_during_a_burst_and_restore_them_afterwards(
    fleet: RunningFleet, right: list[str]
) -> None:
    streams = burst(fleet, "burst")
    fleet.until(lambda: changes(fleet, "drop") == 1, 60, "the pair to share its layers")
    assert texts(streams) == right
    fleet.until(lambda: changes(fleet, "restore") == 1, 60, "the layers to come back")
    pages = [f"http://{engine['http']}" for engine in fleet.engines().values()]
    for cost in ("batches", "peer_seconds", "peer_bytes"):
        assert all(metric(page, f"conserve_split_{cost}_total") > 0 for page in pages)


def test_a_decoder_whose_peer_is_killed_while_they_share_layers_serves_alone(
    fleet: RunningFleet, right: list[str]
) -> None:
    """An engine without a batch does not notice that its peer has ended. The status command can take longer
    than a burst, so the test collects all that it needs from it before the burst."""
    page, survivor = f"http://{fleet.status()['metrics']}", f"http://{fleet.engines()['mixed-0']['http']}"
    peer = vllm_process(fleet, "mixed-1", "VLLM::EngineCore")
    before = changes_at(page, "drop")
    lost = metric(survivor, "conserve_splits_total", outcome="lost")
    streams = burst(fleet, "killed")
    fleet.until(lambda: changes_at(page, "drop") == before + 1, 60, "the pair to share its layers")
    fleet.kill(peer)
    killed = time.monotonic()
    assert not all(stream.finished for stream in streams), "the burst had ended: nobody would notice"
    fleet.until(lambda: metric(survivor, "conserve_splits_total", outcome="lost") > lost, 10, "whole again")
    assert time.monotonic() - killed < 10
    assert texts(streams) == right
