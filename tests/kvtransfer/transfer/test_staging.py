"""Prompts of any length pass through a staging window of any size, without deadlock or refusal."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.config import ConnectorConfigError
from kvtransfer.metrics import Reason
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.kv_memory import BlockMemory, HostBlockMemory
from kvtransfer.transfer.peers import Cancellation, TransferEnd, TransferServer, TransferSource, fetch
from kvtransfer.transfer.staging import SlotWindow, StagedBlockMemory
from kvtransfer.transfer.wire import TransferRefused

pytestmark = pytest.mark.slow

SECRET = b"a secret for these tests"
LAYERS, BLOCK_TOKENS = 3, 16
PROMPTS, TOKENS = 8, 128 * 1024 - 5
BLOCKS = PROMPTS * 8192 + 1

asking = st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80)


@settings(deadline=None)
@given(slots=st.integers(2, 12), steps=asking)
def test_slots_are_given_in_the_order_of_asking_and_receivers_never_wait_for_senders(
    slots: int, steps: list[tuple[bool, int]]
) -> None:
    window = SlotWindow(slots)
    users: dict[int, bool] = {}  # ticket -> whether it sends, in the order of asking
    for sends, which in steps:
        if users and which % 3 == 0:  # one ends: it has been served, or gave up
            window.end(ended := list(users)[which % len(users)])
            del users[ended]
        else:
            users[window.ask(sends)] = sends
        held = {ticket: slot for ticket in users if (slot := window.slot_of(ticket)) is not None}
        assert len(set(held.values())) == len(held), "a slot is one's at a time"
        assert set(held.values()) <= set(range(slots))
        for way in (True, False):
            line = [ticket in held for ticket, sending in users.items() if sending is way]
            assert line == sorted(line, reverse=True), "in the order of asking"
        waits = [users[ticket] for ticket in users if ticket not in held]
        if False in waits:
            assert len(held) == slots, "who receives waits for nothing but a slot"
        sending = sum(users[ticket] for ticket in held)
        assert sending < slots
        if True in waits and len(held) < slots:
            assert sending == slots - max(1, slots // 4)


def made_kv(filled: bool) -> dict[str, torch.Tensor]:
    """Return layers of different sizes, like those of models with several kinds of attention."""
    kv = {}
    for layer in range(LAYERS):
        shape = (BLOCKS, 2, 1, BLOCK_TOKENS, 8 if layer else 16)
        kv[f"layer{layer}"] = torch.randn(shape).bfloat16() if filled else torch.zeros(shape).bfloat16()
    return kv


@contextmanager
def serving(exports: Exports, timeout_s: float = 20.0) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    TransferServer(listener, TransferEnd(1, 0, 1, timeout_s, SECRET), exports)
    yield int(listener.getsockname()[1])
    listener.close()


def test_eight_prompts_of_128k_tokens_pass_through_a_hundredth_of_their_kv() -> None:
    """KV is computed layer by layer in steps, as by concurrent prefills, and staged at both ends."""
    made, theirs, mine = made_kv(True), made_kv(False), made_kv(False)
    window = sum(tensor.nbytes for tensor in made.values()) // 100
    producer, consumer = (StagedBlockMemory(kv, BLOCKS, window) for kv in (theirs, mine))
    exports = Exports(producer, BLOCK_TOKENS, 60, time.monotonic)
    scattered = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1
    prompts = [blocks.tolist() for blocks in scattered.split((BLOCKS - 1) // PROMPTS)]
    into = [blocks.tolist() for blocks in (BLOCKS - scattered).split((BLOCKS - 1) // PROMPTS)]

    def prefill() -> None:
        step = 16 * 1024
        for number, blocks in enumerate(prompts):
            exports.open(f"t{number}", [blocks], TOKENS, "p")
        for end in range(step, TOKENS + step, step):
            exports.begin_step([(f"t{number}", min(end, TOKENS)) for number in range(PROMPTS)])
            now = [block for blocks in prompts for block in blocks[(end - step) // 16 : end // 16]]
            for layer, name in enumerate(made):
                theirs[name][now] = made[name][now]
                exports.after_layer(layer)
        for number in range(PROMPTS):
            exports.finish(f"t{number}")

    with serving(exports) as port, ThreadPoolExecutor(PROMPTS) as threads:
        ends = TransferEnd(1, 0, 1, 20.0, SECRET)
        fetched = [
            threads.submit(
                fetch,
                TransferSource("127.0.0.1", port, f"t{number}", 1, "p"),
                [0],
                [blocks],
                consumer,
                ends,
                Cancellation(),
            )
            for number, blocks in enumerate(into)
        ]
        prefill()
        received = [one.result(60) for one in fetched]
    assert sum(received) == sum(tensor[1:].nbytes for tensor in made.values())
    for name, kv in made.items():
        assert torch.equal(mine[name][BLOCKS - scattered], kv[scattered])
    for memory in (producer, consumer):
        assert all_slots_free(memory)
        memory.close()


def all_slots_free(memory: StagedBlockMemory) -> bool:
    """Return whether every slot can be taken for receiving, so that none has leaked."""
    with ExitStack() as held:
        slots = memory.slots
        for _ in range(slots):
            held.enter_context(memory.incoming(0, [0], 0.5))
        with pytest.raises(TransferRefused, match=r"no slot of the staging window in 0\.01 s"):
            held.enter_context(memory.incoming(0, [0], 0.01))
    return slots >= 2


def test_engines_that_send_to_each_other_do_not_wait_for_each_other() -> None:
    """In both directions together there are more transfers than slots."""
    names = [f"t{number}" for number in range(6)]
    kv = [torch.randn(200, 8, 256, 32) for _ in range(2)]
    copies = [tensor.clone() for tensor in kv]
    memories = [StagedBlockMemory({"layer": tensor}, 200, 1 << 20) for tensor in kv]
    me = TransferEnd(1, 0, 1, 5.0, SECRET)
    with ExitStack() as both, ThreadPoolExecutor(12) as threads:
        ports = [both.enter_context(serving(exported(memory, *names))) for memory in memories]
        fetched = [
            threads.submit(
                fetch,
                TransferSource("127.0.0.1", port, name, 1, "p"),
                [0],
                [list(range(100, 200))],
                memory,
                me,
                Cancellation(),
            )
            for name in names
            for port, memory in zip(ports, reversed(memories), strict=True)
        ]
        assert [one.result(30) for one in fetched] == [kv[0][:100].nbytes] * 12
    for tensor, copy in zip(reversed(kv), copies, strict=True):
        assert torch.equal(tensor[100:], copy[:100])


def can_send(memory: StagedBlockMemory) -> bool:
    try:
        with memory.outgoing(0, [0], 0.01):
            return True
    except TransferRefused:
        return False


def exported(memory: BlockMemory, *names: str) -> Exports:
    exports = Exports(memory, BLOCK_TOKENS, 60, time.monotonic)
    for name in names:
        exports.open(name, [list(range(100))], 1600, "p")
    exports.begin_step([(name, 1600) for name in names])
    exports.after_layer(0)
    return exports


def test_receivers_that_stall_are_timed_out_and_other_transfers_go_on() -> None:
    """Every slot has a transfer whose receiver stalls while the slot's blocks are sent to it."""
    producer = StagedBlockMemory({"layer": torch.randn(200, 8, 1024, 32)}, 200, 24 << 20)
    stalled = [f"stalled{number}" for number in range(producer.slots)]
    exports = exported(producer, *stalled, "t")
    mine = torch.zeros(200, 8, 1024, 32)

    class Stalling(HostBlockMemory):
        def incoming(self, *wanted: object) -> "ExitStack":  # type: ignore[override]
            gone.wait(20)
            raise TransferRefused(Reason.CANCELLED)

    gone = threading.Event()
    with serving(exports, timeout_s=2.0) as port, ThreadPoolExecutor() as threads:

        def ask(name: str, memory: BlockMemory) -> int:
            source = TransferSource("127.0.0.1", port, name, 1, "p")
            return fetch(
                source, [0], [list(range(100))], memory, TransferEnd(1, 0, 1, 10.0, SECRET), Cancellation()
            )

        waiting = [threads.submit(ask, name, Stalling({"layer": mine}, 200)) for name in stalled]
        while can_send(producer):
            time.sleep(0.01)
        began = time.monotonic()
        assert ask("t", HostBlockMemory({"layer": mine}, 200)) == mine[:100].nbytes
        assert 0.5 < time.monotonic() - began < 5
        gone.set()
        assert [type(one.exception()) for one in waiting] == [TransferRefused] * len(stalled)
    assert all_slots_free(producer)


def test_a_window_that_holds_less_than_two_blocks_is_refused_at_start() -> None:
    kv = {"layer": torch.zeros(20, 2, 16, 32)}  # blocks of 4 KiB
    with pytest.raises(ConnectorConfigError, match="raise staging_gib"):
        StagedBlockMemory(kv, 20, 4096)
    StagedBlockMemory(kv, 20, 8192).close()


def test_incompletely_received_blocks_are_not_written_to_the_kv() -> None:
    kv = torch.randn(20, 2, 16, 32)
    before = kv[7].clone()
    memory = StagedBlockMemory({"layer": kv}, 20, 1 << 20)
    with pytest.raises(TransferRefused), memory.incoming(0, [7], 1) as (view,):
        view[:] = bytes(len(view))
        raise TransferRefused(Reason.CORRUPT)
    assert torch.equal(kv[7], before)
    with memory.incoming(0, [7], 1) as (view,):
        view[:] = bytes(len(view))
    assert not kv[7].any()
    memory.close()


KINDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "fp8": ((BLOCK_TOKENS, 2, 32), torch.float8_e4m3fn),
    "latent": ((BLOCK_TOKENS, 576), torch.bfloat16),  # DeepSeek-V3's
    "latent in fp8 with scales": ((BLOCK_TOKENS, 656), torch.uint8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_kv_types_that_this_cpu_cannot_compute_arrive_unchanged(kind: str, staged: bool) -> None:
    shape, dtype = KINDS[kind]
    theirs, mine = torch.randn(200, *shape).to(dtype), torch.zeros(200, *shape).to(dtype)

    def memory(kv: torch.Tensor) -> BlockMemory:
        there = {"layer": kv}
        return StagedBlockMemory(there, 200, 1 << 20) if staged else HostBlockMemory(there, 200)

    into = list(range(100, 200))
    with serving(exported(memory(theirs), "t")) as port:
        source, me = TransferSource("127.0.0.1", port, "t", 1, "p"), TransferEnd(1, 0, 1, 5.0, SECRET)
        fetch(source, [0], [into], memory(mine), me, Cancellation())
    assert torch.equal(mine[100:].view(torch.uint8), theirs[:100].view(torch.uint8))
