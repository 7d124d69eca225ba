"""Two to four workers without engines share layers: KV stays separate, and bad messages are refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.control.control_socket import EngineCommand
from placement.overload.drop_plan import EngineShape
from tests.workers.overload import broken
from tests.workers.overload.workers_here import (
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    LIMITS,
    SECRET,
    USED,
    Group,
    a_batch,
    at_once,
    dropping,
    drops,
    restores,
    scheduler_side,
    split,
)
from workers.engine.overload.orders import DropOrder, SplitEvent
from workers.engine.overload.pages.cpu_pages import PageError
from workers.engine.overload.pages.layer_memory import ReservedKv
from workers.engine.overload.split.peer_link import Message, MessageKind, PeerConnection, PeerRefused


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_engine_of_a_split_keeps_the_others_kv_in_separate_regions_and_gives_it_back(
    four: Group, size: int
) -> None:
    group = four[:size]
    split(group)
    kept = [layer for worker in group for layer in worker.split.member.kept]  # type: ignore[union-attr]
    assert kept == list(range(LAYERS))
    for keeper in group:
        member = keeper.split.member
        assert member is not None
        for part, owner in enumerate(group):
            rows = [row + member.region(part) for row in USED]
            for layer in member.kept:
                assert torch.equal(keeper.split.kv.read(layer, rows), owner.had[layer])
    assert not any(worker.whole for worker in group)
    ended, _ = at_once(*restores(group))
    assert ended == [SplitEvent.RESTORED] * size
    assert all(worker.whole and worker.has_all for worker in group)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_pool_of_a_member_is_as_large_as_the_drop_plan_computes(four: Group, size: int) -> None:
    facts = four[0].model.facts()
    shape = EngineShape(
        facts.layers,
        facts.layer_bytes,
        BLOCKS * BLOCK_TOKENS,
        facts.row_bytes * LAYERS / BLOCK_TOKENS,
        facts.activation_bytes,
        1e9,
        None,
    )
    split(four[:size])
    member = four[0].split.member
    assert member is not None
    planned = shape.kv_each(size)
    assert planned - BLOCK_TOKENS < member.blocks * BLOCK_TOKENS <= planned


def test_peers_whose_blocks_share_a_region_overwrite_each_other(four: Group) -> None:
    three = four[:3]
    for worker in three:
        broken.break_with(worker.model, "InOneRegion")
    split(three)
    ended, _ = at_once(*restores(three))
    assert ended == [SplitEvent.RESTORED] * 3
    assert not all(worker.has_all for worker in three)


def test_members_keep_their_whole_models_if_others_get_no_order(four: Group) -> None:
    for worker in four:
        worker.split.limits = replace(LIMITS, meet_s=0.5, order_s=10.0)
    ended, seconds = at_once(*drops(*four)[:2])
    assert ended == [SplitEvent.NOT_SPLIT] * 2 and seconds < 5
    assert all(worker.whole and worker.has_all and not worker.split.lost for worker in four)


def test_members_with_orders_for_different_groups_do_not_share_layers(four: Group) -> None:
    a, b, c, d = (worker.model.facts().address for worker in four)
    told = [(0, (a, b, c)), (1, (a, b, d)), (2, (a, b, c)), (2, (a, b, d))]  # each worker's own part is right
    steps = [
        dropping(worker, DropOrder(1, members, part, USED))
        for worker, (part, members) in zip(four, told, strict=True)
    ]
    ended, _ = at_once(*steps)
    assert ended == [SplitEvent.NOT_SPLIT] * 4
    assert all(worker.whole and worker.has_all for worker in four)


@pytest.fixture
def line(four: Group) -> Iterator[PeerConnection]:
    """Return a connection to the first of three members from a process that is no member but has the key."""
    split(four[:3])
    made = PeerConnection(four[0].model.facts().address, SECRET, 5.0)
    yield made
    made.close()


@pytest.mark.parametrize("part", [0, 3, -1, "1", 1.0, True, None])
@pytest.mark.parametrize("kind", [MessageKind.MEET, MessageKind.PUT, MessageKind.GET, MessageKind.RUN])
def test_a_message_that_names_no_other_member_is_refused(
    four: Group, line: PeerConnection, kind: MessageKind, part: Any
) -> None:
    members = [worker.model.facts().address for worker in four[:3]]
    known = {"layer": 0, "rows": [1], "phase": 1, "members": members, "sizes": [1, 1, 1]}
    with pytest.raises(PeerRefused, match="is no other part of epoch 1"):
        line.request(Message(kind, 1, {**known, "part": part}, [torch.zeros(1, 2, 32)]))


@pytest.mark.parametrize("row", [-1, 1_000, "1", 1.5, None])
def test_blocks_outside_the_pool_of_the_sender_are_refused(
    four: Group, line: PeerConnection, row: Any
) -> None:
    member = four[0].split.member
    assert member is not None
    for one in (row, member.blocks):
        for kind, values in (
            (MessageKind.PUT, {"layer": 0, "rows": [1, one]}),
            (MessageKind.GET, {"layer": 0, "rows": [one, 1]}),
        ):
            with pytest.raises(PeerRefused, match="is no block of a pool"):
                line.request(Message(kind, 1, {**values, "part": 1}, [torch.zeros(2, 2, 32)]))
    assert all(worker.model.is_split for worker in four[:3])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"block": block} for block in (10**6, -5)),
        *({"slot": slot} for slot in (10**9, -2)),
        *({"length": length} for length in (-1, 10**6)),
        {"longest": 10**6},
        *({"starts": starts} for starts in ((0, 2), (1, 0), (-1, 1), (0, 1, 1))),
    ],
)
def test_a_batch_with_blocks_outside_its_pool_is_refused(
    four: Group, line: PeerConnection, wrong: dict[str, Any]
) -> None:
    values, tensors = a_batch(**wrong)
    with pytest.raises(PeerRefused, match="not a valid batch of a pool of"):
        line.request(Message(MessageKind.RUN, 1, values, tensors))
    assert four[0].model.is_split


@pytest.mark.parametrize("wrong", [RuntimeError("out of memory"), PageError("mmap: Cannot allocate memory")])
def test_all_members_keep_their_whole_models_if_memory_runs_out(
    four: Group, monkeypatch: pytest.MonkeyPatch, wrong: Exception
) -> None:
    """Memory runs out while a drop copies KV to the host; torch and the system raise different errors."""
    kv, layers = four[1].split.kv, []

    def drop(some: Any, rows: Any) -> None:
        layers.extend(some)
        ReservedKv.drop(kv, some[:3], rows)
        raise wrong

    monkeypatch.setattr(kv, "drop", drop)
    ended, _ = at_once(*drops(*four[:2]))
    assert ended == [SplitEvent.NOT_SPLIT] * 2 and len(layers) == LAYERS // 2
    assert all(worker.whole and worker.has_all and not worker.split.lost for worker in four[:2])
    assert all(not worker.memory.free for worker in four[:2])


@pytest.mark.parametrize(
    ("members", "part", "why"),
    [
        (("a:1",), 0, "needs 2 to 3 different members"),
        (("a:1", "b:1", "c:1", "d:1"), 0, "needs 2 to 3 different members"),
        (("a:1", "b:1", "b:1"), 0, "needs 2 to 3 different members"),
        (("a:1", "b:1"), 2, "part 2 of these members is not this engine"),
        (("a:1", "b:1"), -2, "part -2 of these members is not this engine"),
        (("a:1", "b:1"), 1, "part 1 of these members is not this engine"),
    ],
)
def test_a_drop_command_with_wrong_members_is_refused(members: tuple[str, ...], part: int, why: str) -> None:
    side = scheduler_side("a:1", layers=3)
    assert why in side.inbox.drop(EngineCommand("drop", epoch=1, members=members, part=part)).error
    assert not side.pending
    assert side.inbox.drop(EngineCommand("drop", epoch=1, members=("b:1", "a:1", "c:1"), part=1)).done


def test_a_drop_command_is_refused_before_the_worker_is_ready() -> None:
    side = scheduler_side("a:1", layers=1)
    assert side.inbox.drop(EngineCommand("drop", epoch=1, members=("a:1", "b:1"), part=0)).error
