"""Host slots and conversations together: nothing leaks, whatever happens in whatever order."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.config import ConnectorConfig
from kvtransfer.retention.retained_conversations import RetainedConversation, RetentionPhase
from kvtransfer.shared_state import Residence, Slot, block_faults, host_faults

SLOTS = 6
KEYS = st.sampled_from("abcd")


class ConversationLives(RuleBasedStateMachine):
    """Turns, copies, releases and time in any order; the copier may lag behind arbitrarily."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        config = ConnectorConfig(park_after_s=10, ttl_s=100)
        self.residence = Residence(config, SLOTS, lambda: self.now)
        self.running: list[tuple[RetainedConversation, list[bytes]]] = []
        self.storing: list[Slot] = []
        self.loading: list[Slot] = []

    @rule(key=KEYS, length=st.integers(1, 4), branch=st.sampled_from(["", "x"]))
    def begin(self, key: str, length: int, branch: str) -> None:
        prompt = [f"{key}{branch}{n}".encode() if n else b"shared" for n in range(length)]
        self.running.append((self.residence.conversations.begin_turn(key, prompt), prompt))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if not self.running:
            return
        index = data.draw(st.integers(0, len(self.running) - 1))
        conversation, prompt = self.running.pop(index)
        computed = data.draw(st.integers(0, len(prompt)))  # fewer than all: aborted
        if computed > len(conversation.chain):
            self.residence.conversations.advance(conversation, prompt[:computed])
        self.residence.conversations.end_turn(conversation)
        for block in conversation.chain:
            if conversation.on_host and self.residence.conversations.wanted_on_host(block):
                self._store(block, conversation)

    def _store(self, block: bytes, owner: RetainedConversation) -> None:
        if block not in self.residence.host and (slot := self.residence.host_slot(block, owner)):
            self.storing.append(slot)

    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        if self.storing:
            slot = self.storing.pop(data.draw(st.integers(0, len(self.storing) - 1)))
            self.residence.host.end_store(slot.number)

    @rule(block=st.sampled_from([b"shared", b"a1", b"b1", b"cx2"]))
    def load(self, block: bytes) -> None:
        if self.residence.host.stored(block):
            slot = self.residence.host.begin_load(block)
            assert slot is not None
            self.loading.append(slot)

    @rule(corrupt=st.booleans())
    def loaded(self, corrupt: bool) -> None:
        if self.loading:
            slot = self.loading.pop()
            self.residence.host.end_load(slot.number)
            if corrupt:
                self.residence.host.drop_slot(slot.number)

    @rule(key=KEYS)
    def release(self, key: str) -> None:
        self.residence.release(key)

    @rule(key=KEYS)
    def park(self, key: str) -> None:
        if self.residence.park(key):
            conversation = self.residence.conversations.get(key)
            assert conversation is not None
            # There, or on its way: time may have parked it already.
            assert all(block in self.residence.host for block in conversation.chain)

    @rule(seconds=st.sampled_from([1.0, 20.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.residence.let_time_pass()

    @rule()
    def reset(self) -> None:
        self.residence.reset()

    @invariant()
    def nothing_leaks(self) -> None:
        assert host_faults(self.residence.host, self.residence.conversations) == []

    def teardown(self) -> None:
        """When everything has ended, everything is free."""
        for conversation, _ in self.running:
            self.residence.conversations.end_turn(conversation)
        for slot in self.storing:
            self.residence.host.end_store(slot.number)
        for slot in self.loading:
            self.residence.host.end_load(slot.number)
        for key in "abcd":
            self.residence.release(key)
        assert self.residence.host.free == SLOTS
        assert len(self.residence.conversations) == 0


TestLife = ConversationLives.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def idle(residence: Residence, key: str, blocks: list[bytes]) -> RetainedConversation:
    conversation = residence.conversations.begin_turn(key, blocks)
    residence.conversations.advance(conversation, blocks)
    residence.conversations.end_turn(conversation)
    for block in blocks:
        slot = residence.host_slot(block, conversation)
        assert slot is not None
        residence.host.end_store(slot.number)
    return conversation


def test_only_what_is_on_the_host_entirely_is_parked() -> None:
    residence = Residence(ConnectorConfig(), 4, lambda: 0.0)
    conversation = idle(residence, "a", [b"1", b"2"])
    residence.host.drop(b"2")
    assert not residence.park("a")
    assert conversation.phase is RetentionPhase.RETAINED


def test_only_who_is_told_when_forgets_what_nobody_ended() -> None:
    now = [0.0]
    residence = Residence(ConnectorConfig(), 4, lambda: now[0])
    idle(residence, "a", [b"1"])
    now[0] = 1e9
    residence.let_time_pass()
    assert residence.conversations.get("a") is not None


def test_idle_conversations_are_parked_then_forgotten() -> None:
    now = [0.0]
    residence = Residence(ConnectorConfig(park_after_s=10, ttl_s=100), 4, lambda: now[0])
    conversation = idle(residence, "a", [b"1", b"2"])
    now[0] = 10
    residence.let_time_pass()
    assert conversation.phase is RetentionPhase.PARKED
    now[0] = 100
    residence.let_time_pass()
    assert len(residence.conversations) == 0 and residence.host.free == 4


def test_a_client_says_how_long_its_kv_stays_where() -> None:
    now = [0.0]
    residence = Residence(ConnectorConfig(park_after_s=10, ttl_s=100), 8, lambda: now[0])
    away, kept = idle(residence, "a", [b"1"]), idle(residence, "b", [b"2"])
    away.park_after_s, kept.park_after_s, kept.ttl_s = 0.0, 50.0, 1000.0
    residence.let_time_pass()
    assert away.phase is RetentionPhase.PARKED
    now[0] = 49
    residence.let_time_pass()
    assert kept.phase is RetentionPhase.RETAINED
    now[0] = 100
    residence.let_time_pass()
    assert [one.key for one in residence.conversations] == ["b"]
    assert kept.phase is RetentionPhase.PARKED
    assert residence.counts["parked.said"] == 2


def test_time_parks_what_is_still_on_its_way_to_the_host_and_pressure_does_not() -> None:
    now = [0.0]
    residence = Residence(ConnectorConfig(park_after_s=10), 4, lambda: now[0])
    conversation = idle(residence, "a", [b"1"])
    residence.conversations.advance(conversation, [b"1", b"2"])
    assert residence.host_slot(b"2", conversation) is not None  # a copy whose end nobody has told yet
    residence.relieve(2)
    assert conversation.phase is RetentionPhase.RETAINED
    now[0] = 10
    residence.let_time_pass()
    assert conversation.phase is RetentionPhase.PARKED


def test_time_does_not_park_what_is_not_on_its_way() -> None:
    now = [0.0]
    residence = Residence(ConnectorConfig(park_after_s=10), 4, lambda: now[0])
    conversation = idle(residence, "a", [b"1", b"2"])
    residence.host.drop(b"2")
    now[0] = 10
    residence.let_time_pass()
    assert conversation.phase is RetentionPhase.RETAINED


def test_whole_conversations_leave_a_full_host_the_least_recently_used_first() -> None:
    now = [0.0]
    residence = Residence(ConnectorConfig(), 4, lambda: now[0])
    old = idle(residence, "old", [b"1", b"2"])
    now[0] = 1
    new = idle(residence, "new", [b"3", b"4"])
    now[0] = 2
    third = idle(residence, "third", [b"5"])
    assert (old.on_host, new.on_host, third.on_host) == (False, True, True)
    assert residence.host.free == 1


class HeldBlock:
    is_null = False

    def __init__(self, block_id: int, ref_cnt: int) -> None:
        self.block_id, self.ref_cnt = block_id, ref_cnt


def test_a_reference_nobody_accounts_for_is_a_fault() -> None:
    blocks = [HeldBlock(1, 0), HeldBlock(2, 1), HeldBlock(3, 1)]
    assert block_faults(blocks, 1, {"transfer": [2], "checkpoint": [3]}) == []
    assert len(block_faults(blocks, 1, {"transfer": [2]})) == 1
    assert len(block_faults(blocks, 2, {"transfer": [2, 3]})) == 1
