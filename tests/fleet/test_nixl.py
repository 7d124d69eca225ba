"""NIXL moves a first turn's KV between engines, and our connector keeps it.

A fleet of its own. Only where NIXL is installed: pip install --no-deps nixl nixl_cu12
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.talk import client, get, metric, opening, text_turn
from tests.support.fleet import RunningFleet, fleet_up

pytest.importorskip("nixl", reason="nixl is not installed: pip install --no-deps nixl nixl_cu12")

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
LOOPBACK = {"UCX_TLS": "tcp,self,sysv,posix,cma", "UCX_NET_DEVICES": "lo"}


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    def edit(content: Any) -> None:
        # NIXL's progress thread takes a core for each idle engine: on two cores a transfer may take 40 s.
        content |= {"name": "nixl", "transfer": {"backend": "nixl", "lease": "10m"}}
        content["engine"]["env"] |= LOOPBACK
        content["tiers"][1]["replicas"] = 1

    with fleet_up("laptop", edit) as fleet:
        yield fleet


def by_source(fleet: RunningFleet) -> dict[str, float]:
    url = f"http://{fleet.engines()['decode-0']['http']}"
    return {s: metric(url, BY_SOURCE, source=s) for s in ("local_compute", "external_kv_transfer")}


def test_a_first_turn_moves_once_and_later_turns_find_it(fleet: RunningFleet) -> None:
    messages = opening(91, 200)
    sdk = client(fleet.url, "carried")
    before = by_source(fleet)
    first = text_turn(sdk, fleet.model, messages)
    after = by_source(fleet)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] >= 0.9 * first.prompt_tokens
    assert after["local_compute"] - before["local_compute"] <= 64, "the decoder computed the prompt itself"

    messages.append({"role": "user", "content": "Go on."})
    second = text_turn(sdk, fleet.model, messages)
    new = second.prompt_tokens - first.prompt_tokens
    assert by_source(fleet)["local_compute"] - after["local_compute"] <= new + 32

    (found,) = get(fleet.url, "/v1/conversations", "carried")["data"]
    assert found["transfers"] == 1 and found["decoder"] == "decode-0"
    # The same prompt, computed by the decoder alone: the salt keeps it apart from all that is cached.
    anew = text_turn(client(fleet.url, "anew"), fleet.model, messages[:-1], extra_body={"cache_salt": "anew"})
    assert anew.text == second.text
