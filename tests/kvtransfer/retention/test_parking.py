"""Host slots and conversations never leak, in any order of events."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.checkpoint.copy_orders import DiskMove
from kvtransfer.checkpoint.host_index import Slot, block_faults, host_faults
from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import RetainedConversation, RetentionPhase

SLOTS, DISK_SLOTS = 8, 3
KEYS = st.sampled_from("abcd")


class ConversationLives(RuleBasedStateMachine):
    """Random sequences of turns, copies, releases and timers, with a copier that may lag behind."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        config = ConnectorConfig(park_after_s=10, ttl_s=100)
        self.kv_state = SharedKvState(config, SLOTS, lambda: self.now, disk_slots=DISK_SLOTS)
        self.moving: list[DiskMove] = []
        self.running: list[tuple[RetainedConversation, list[bytes]]] = []
        self.storing: list[Slot] = []
        self.loading: list[Slot] = []

    @rule(key=KEYS, length=st.integers(1, 4), branch=st.sampled_from(["", "x"]))
    def begin(self, key: str, length: int, branch: str) -> None:
        prompt = [f"{key}{branch}{n}".encode() if n else b"shared" for n in range(length)]
        self.running.append((self.kv_state.conversations.begin_turn(key, prompt), prompt))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if not self.running:
            return
        index = data.draw(st.integers(0, len(self.running) - 1))
        conversation, prompt = self.running.pop(index)
        aborted = data.draw(st.integers(0, 3)) == 0
        computed = data.draw(st.integers(0, len(prompt))) if aborted else len(prompt)
        if computed > len(conversation.chain):
            self.kv_state.conversations.advance(conversation, prompt[:computed])
        self.kv_state.conversations.end_turn(conversation)
        for block in conversation.chain:
            if conversation.on_host and self.kv_state.conversations.wanted_on_host(block):
                self._store(block, conversation)
        if data.draw(st.booleans()):  # the copier does not lag behind
            for slot in self.storing:
                self.kv_state.host.end_store(slot.number)
            self.storing.clear()

    def _store(self, block: bytes, owner: RetainedConversation) -> None:
        if block not in self.kv_state.host and (slot := self.kv_state.claim_host_slot(block, owner)):
            self.storing.append(slot)

    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        if self.storing:
            slot = self.storing.pop(data.draw(st.integers(0, len(self.storing) - 1)))
            self.kv_state.host.end_store(slot.number)

    @rule(block=st.sampled_from([b"shared", b"a1", b"b1", b"cx2"]))
    def load(self, block: bytes) -> None:
        if self.kv_state.host.stored(block):
            slot = self.kv_state.host.begin_load(block)
            assert slot is not None
            self.loading.append(slot)

    @rule(corrupt=st.booleans())
    def loaded(self, corrupt: bool) -> None:
        if self.loading:
            slot = self.loading.pop()
            self.kv_state.host.end_load(slot.number)
            if corrupt:
                self.kv_state.host.drop_slot(slot.number)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        blocks = sorted(self.kv_state.host.blocks())
        for block in blocks[: data.draw(st.integers(1, DISK_SLOTS))]:
            if move := self.kv_state.host.begin_move(block):
                self.moving.append(move)

    @rule(written=st.booleans(), data=st.data())
    def moved(self, written: bool, data: st.DataObject) -> None:
        if self.moving:
            move = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
            self.kv_state.host.end_move(move.disk_slot, written)

    @rule(key=KEYS)
    def release(self, key: str) -> None:
        self.kv_state.release(key)

    @rule(key=KEYS)
    def park(self, key: str) -> None:
        if self.kv_state.park(key):
            conversation = self.kv_state.conversations.get(key)
            assert conversation is not None
            # A block may still be on its way: a timer may have parked the conversation already.
            assert all(block in self.kv_state.host for block in conversation.chain)

    @rule(seconds=st.sampled_from([1.0, 20.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.kv_state.park_and_expire()

    @rule()
    def reset(self) -> None:
        self.kv_state.reset()

    @invariant()
    def nothing_leaks(self) -> None:
        assert host_faults(self.kv_state.host, self.kv_state.conversations) == []

    def teardown(self) -> None:
        """Check that everything is free after all conversations have ended."""
        for conversation, _ in self.running:
            self.kv_state.conversations.end_turn(conversation)
        for slot in self.storing:
            self.kv_state.host.end_store(slot.number)
        for slot in self.loading:
            self.kv_state.host.end_load(slot.number)
        for move in self.moving:
            self.kv_state.host.end_move(move.disk_slot, written=True)
        for key in "abcd":
            self.kv_state.release(key)
        assert self.kv_state.host.free == SLOTS and self.kv_state.host.free_on_disk == DISK_SLOTS
        assert len(self.kv_state.conversations) == 0


TestLife = ConversationLives.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def idle(kv_state: SharedKvState, key: str, blocks: list[bytes]) -> RetainedConversation:
    conversation = kv_state.conversations.begin_turn(key, blocks)
    kv_state.conversations.advance(conversation, blocks)
    kv_state.conversations.end_turn(conversation)
    for block in blocks:
        slot = kv_state.claim_host_slot(block, conversation)
        assert slot is not None
        kv_state.host.end_store(slot.number)
    return conversation


def test_only_conversations_entirely_on_the_host_are_parked() -> None:
    kv_state = SharedKvState(ConnectorConfig(), 4, lambda: 0.0)
    conversation = idle(kv_state, "a", [b"1", b"2"])
    kv_state.host.drop(b"2")
    assert not kv_state.park("a")
    assert conversation.phase is RetentionPhase.RETAINED


def test_only_an_engine_with_a_lifetime_setting_forgets_idle_conversations() -> None:
    now = [0.0]
    kv_state = SharedKvState(ConnectorConfig(), 4, lambda: now[0])
    idle(kv_state, "a", [b"1"])
    now[0] = 1e9
    kv_state.park_and_expire()
    assert kv_state.conversations.get("a") is not None


def test_idle_conversations_are_parked_then_forgotten() -> None:
    now = [0.0]
    kv_state = SharedKvState(ConnectorConfig(park_after_s=10, ttl_s=100), 4, lambda: now[0])
    conversation = idle(kv_state, "a", [b"1", b"2"])
    now[0] = 10
    kv_state.park_and_expire()
    assert conversation.phase is RetentionPhase.PARKED
    now[0] = 100
    kv_state.park_and_expire()
    assert len(kv_state.conversations) == 0 and kv_state.host.free == 4


def test_a_client_sets_how_long_its_kv_stays_on_device_and_host() -> None:
    now = [0.0]
    kv_state = SharedKvState(ConnectorConfig(park_after_s=10, ttl_s=100), 8, lambda: now[0])
    away, kept = idle(kv_state, "a", [b"1"]), idle(kv_state, "b", [b"2"])
    away.park_after_s, kept.park_after_s, kept.ttl_s = 0.0, 50.0, 1000.0
    kv_state.park_and_expire()
    assert away.phase is RetentionPhase.PARKED
    now[0] = 49
    kv_state.park_and_expire()
    assert kept.phase is RetentionPhase.RETAINED
    now[0] = 100
    kv_state.park_and_expire()
    assert [one.key for one in kv_state.conversations] == ["b"]
    assert kept.phase is RetentionPhase.PARKED
    assert kv_state.counts["parked.said"] == 2


def test_the_timer_parks_a_conversation_during_its_last_copy_but_pressure_does_not() -> None:
    now = [0.0]
    kv_state = SharedKvState(ConnectorConfig(park_after_s=10), 4, lambda: now[0])
    conversation = idle(kv_state, "a", [b"1"])
    kv_state.conversations.advance(conversation, [b"1", b"2"])
    assert kv_state.claim_host_slot(b"2", conversation) is not None  # a copy whose end nobody has told yet
    kv_state.park_for_pressure(2)
    assert conversation.phase is RetentionPhase.RETAINED
    now[0] = 10
    kv_state.park_and_expire()
    assert conversation.phase is RetentionPhase.PARKED


def test_the_timer_does_not_park_a_conversation_that_lacks_a_block_on_the_host() -> None:
    now = [0.0]
    kv_state = SharedKvState(ConnectorConfig(park_after_s=10), 4, lambda: now[0])
    conversation = idle(kv_state, "a", [b"1", b"2"])
    kv_state.host.drop(b"2")
    now[0] = 10
    kv_state.park_and_expire()
    assert conversation.phase is RetentionPhase.RETAINED


def test_the_least_recently_used_conversation_leaves_a_full_host_as_a_whole() -> None:
    now = [0.0]
    kv_state = SharedKvState(ConnectorConfig(), 4, lambda: now[0])
    old = idle(kv_state, "old", [b"1", b"2"])
    now[0] = 1
    new = idle(kv_state, "new", [b"3", b"4"])
    now[0] = 2
    third = idle(kv_state, "third", [b"5"])
    assert (old.on_host, new.on_host, third.on_host) == (False, True, True)
    assert kv_state.host.free == 1


def holder(kv_state: SharedKvState, kind: str, key: str, blocks: list[bytes]) -> RetainedConversation:
    """Return an owner of host slots: running offline work, a running turn, or an idle conversation."""
    if kind in ("retained", "parked"):
        conversation = idle(kv_state, key, blocks)
        assert kind == "retained" or kv_state.park(key)
        return conversation
    conversation = kv_state.conversations.begin_turn(key, blocks, offline=kind == "offline")
    kv_state.conversations.advance(conversation, blocks)
    for block in blocks:
        slot = kv_state.claim_host_slot(block, conversation)
        assert slot is not None
        kv_state.host.end_store(slot.number)
    return conversation


@pytest.mark.parametrize("holds", ["offline", "retained", "parked", "running"])
@pytest.mark.parametrize("asks", ["offline", "running"])
def test_host_slots_are_taken_only_by_turns_and_only_from_idle_or_offline_owners(
    asks: str, holds: str
) -> None:
    kv_state = SharedKvState(ConnectorConfig(), 2, lambda: 0.0)
    there = holder(kv_state, holds, "there", [b"1", b"2"])
    phase = there.phase
    owner = kv_state.conversations.begin_turn("owner", [b"3"], offline=asks == "offline")
    kv_state.conversations.advance(owner, [b"3"])
    gets = asks == "running" and holds != "running"
    assert (kv_state.claim_host_slot(b"3", owner) is not None) == gets
    assert there.on_host == (not gets)
    assert there.phase is (RetentionPhase.RETAINED if gets and holds == "parked" else phase)
    assert kv_state.changes.unparked == (["there"] if gets and holds == "parked" else [])
    assert kv_state.counts["left_host"] == (gets and holds != "offline")
    assert host_faults(kv_state.host, kv_state.conversations) == []


def test_a_conversation_displaces_offline_work_before_an_older_conversation() -> None:
    now = [0.0]
    kv_state = SharedKvState(ConnectorConfig(), 2, lambda: now[0])
    parked = holder(kv_state, "parked", "agent", [b"1"])
    now[0] = 1
    offline = holder(kv_state, "offline", "batch", [b"2"])
    now[0] = 2
    holder(kv_state, "running", "new", [b"3"])
    assert (parked.on_host, offline.on_host) == (True, False)
    now[0] = 3
    holder(kv_state, "running", "newer", [b"4"])
    assert not parked.on_host


class HeldBlock:
    is_null = False

    def __init__(self, block_id: int, ref_cnt: int) -> None:
        self.block_id, self.ref_cnt = block_id, ref_cnt


def test_a_block_reference_without_a_known_holder_is_a_fault() -> None:
    blocks = [HeldBlock(1, 0), HeldBlock(2, 1), HeldBlock(3, 1)]
    assert block_faults(blocks, 1, {"transfer": [2], "checkpoint": [3]}) == []
    assert len(block_faults(blocks, 1, {"transfer": [2]})) == 1
    assert len(block_faults(blocks, 2, {"transfer": [2, 3]})) == 1
