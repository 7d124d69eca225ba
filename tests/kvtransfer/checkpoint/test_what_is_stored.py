"""Only blocks with confirmed KV are stored on the host, each once, and held until they are copied."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvtransfer.checkpoint.copy_orders import CheckpointReport
from kvtransfer.checkpoint.scheduler import CheckpointScheduler
from kvtransfer.config import ConnectorConfig
from kvtransfer.plugins import EngineContext, Match, StepOutcome
from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import CacheGroup

BLOCK = 16


@dataclass
class StoredRequest:
    """Request with those fields of a vLLM request that the connector reads."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_tokens: int = 1000
    priority: int = 0
    session_id: str = "a"
    kv_transfer_params: None = None


def scheduled(*running: str, admitted: str | None = None) -> SimpleNamespace:
    """Return vLLM's output for a step with running requests and one that is admitted."""
    new = [SimpleNamespace(req_id=admitted)] if admitted else []
    tokens = dict.fromkeys([*running, *([admitted] if admitted else [])], 1)
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )


@dataclass
class PoolBlock:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


@dataclass
class BlocksInUse:
    blocks: list[PoolBlock] = field(default_factory=lambda: [PoolBlock(n) for n in range(40)])

    def touch(self, blocks: list[PoolBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[PoolBlock]) -> None:
        for block in blocks:
            block.ref_cnt -= 1


class StoringEngine:
    def __init__(self, slots: int = 20) -> None:
        self.kv_state = SharedKvState(ConnectorConfig(), slots, lambda: 0.0)
        vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK), parallel_config=SimpleNamespace(world_size=1)
        )
        groups = (CacheGroup(("layer",), BLOCK, 64),)
        context = EngineContext(ConnectorConfig(), vllm_config, None, self.kv_state, groups)
        self.side = CheckpointScheduler(context)
        self.pool = BlocksInUse()
        self.ids = defaultdict(lambda: list(range(30, 40)), {"r": list(range(10, 30))})
        manager = SimpleNamespace(
            block_pool=self.pool, get_block_ids=lambda request_id: [self.ids[request_id]]
        )
        self.side.bind(manager)

    def arrive(self, request: StoredRequest) -> StoredRequest:
        conversation = self.kv_state.conversations.begin_turn(
            request.session_id, request.block_hashes, offline=request.priority > 0
        )
        self.kv_state.requests[request.request_id] = request, conversation
        self.side.on_new_request(request)
        return request

    def step(self, request: StoredRequest, computed: int, in_flight: int = 0) -> list[int]:
        """Schedule a step for `request`; return the ids of the blocks whose copy to the host it orders."""
        request.num_computed_tokens, request.num_in_flight_tokens = computed, in_flight
        conversation = self.kv_state.requests[request.request_id][1]
        full = (computed - in_flight) // BLOCK
        if full > len(conversation.chain):
            self.kv_state.conversations.advance(conversation, request.block_hashes[:full])
        self.kv_state.growing = [request.request_id]  # as the retention plugin does in each step
        order = self.side.order(scheduled(request.request_id))
        return [copy.block for copy in order.stores] if order else []

    def copied(self, *slots: int) -> None:
        self.side.on_outcome(StepOutcome(CheckpointReport(Counter(slots)), frozenset(), frozenset()))


def hashes(count: int, name: str = "h") -> list[bytes]:
    return [f"{name}{n}".encode() for n in range(count)]


def test_each_confirmed_full_block_is_stored_once() -> None:
    engine = StoringEngine()
    request = engine.arrive(StoredRequest("r", hashes(8)))
    assert engine.step(request, computed=40) == [10, 11]
    assert engine.step(request, computed=40) == []
    assert engine.step(request, computed=65) == [12, 13]


def test_blocks_of_a_running_step_are_not_stored_yet() -> None:
    engine = StoringEngine()
    request = engine.arrive(StoredRequest("r", hashes(8)))
    assert engine.step(request, computed=64, in_flight=32) == [10, 11]


def test_a_block_is_held_until_it_is_copied() -> None:
    engine = StoringEngine()
    engine.step(engine.arrive(StoredRequest("r", hashes(8))), computed=16)
    assert engine.pool.blocks[10].ref_cnt == 1
    slot = next(iter(engine.side.copying))
    engine.copied(slot)
    assert engine.pool.blocks[10].ref_cnt == 0
    assert engine.kv_state.host.stored(b"h0")


def test_no_empty_block_is_stored_for_evicted_blocks_of_the_chain() -> None:
    """The conversation's earlier blocks were evicted, so its chain is longer than the recomputed prefix."""
    engine = StoringEngine()
    conversation = engine.kv_state.conversations.begin_turn("a", hashes(8))
    engine.kv_state.conversations.advance(conversation, hashes(8))
    engine.kv_state.conversations.end_turn(conversation)
    request = engine.arrive(StoredRequest("r", hashes(8)))
    assert engine.step(request, computed=20) == [10]


def test_prefix_hits_are_stored_only_after_the_step_that_admits_the_request() -> None:
    """In the step that admits a request, another request may still have to compute these blocks."""
    engine = StoringEngine()
    request = engine.arrive(StoredRequest("r", hashes(8), num_computed_tokens=64))
    engine.kv_state.conversations.advance(engine.kv_state.requests["r"][1], request.block_hashes[:4])
    assert engine.side.order(scheduled(admitted="r")) is None
    assert engine.step(request, computed=64) == [10, 11, 12, 13]


def test_concurrent_turns_do_not_store_each_others_blocks() -> None:
    """Two turns of one conversation run at the same time; they share a prefix and then diverge."""
    engine = StoringEngine()
    one = engine.arrive(StoredRequest("r", hashes(2) + hashes(6, "one")))
    other = engine.arrive(StoredRequest("s", hashes(2) + hashes(6, "other")))
    engine.step(one, computed=3 * BLOCK)
    conversation = engine.kv_state.requests["s"][1]
    engine.kv_state.conversations.advance(conversation, other.block_hashes[:6])
    assert engine.step(one, computed=5 * BLOCK) == []
    assert b"other1" not in engine.kv_state.host


def test_no_block_is_stored_for_a_request_that_ends_while_it_loads() -> None:
    """vLLM counts the tokens of a load as computed before the load has ended."""
    engine = StoringEngine()
    request = engine.arrive(StoredRequest("r", hashes(8), num_computed_tokens=128))
    engine.kv_state.loads.loading.add("r")
    engine.side.on_finished(request, [engine.ids["r"]])
    assert engine.side.order(scheduled()) is None


def test_an_offline_request_loads_kv_only_when_offline_work_may_start() -> None:
    engine = StoringEngine()
    request = engine.arrive(StoredRequest("r", hashes(4), priority=1))
    engine.step(request, computed=64)
    for slot in list(engine.side.copying):
        engine.copied(slot)
    engine.side.offline_may_start = False
    assert engine.side.match(request, 0) is None
    engine.side.offline_may_start = True
    assert engine.side.match(request, 0) == Match(64, background=True)


def test_blocks_released_between_match_and_allocation_are_not_loaded() -> None:
    engine = StoringEngine()
    request = engine.arrive(StoredRequest("r", hashes(4)))
    engine.step(request, computed=64)
    for slot in list(engine.side.copying):
        engine.copied(slot)
    match = engine.side.match(request, 0)
    assert match == Match(64, background=True)
    for block in hashes(4):
        engine.kv_state.host.drop(block)
    blocks = SimpleNamespace(get_block_ids=lambda: [[1, 2, 3, 4]])
    engine.side.after_allocation(request, blocks, match)
    order = engine.side.order(scheduled())
    assert order is not None and {copy.slot for copy in order.loads[0].copies} == {-1}


def test_only_the_blocks_that_fit_are_stored_on_a_full_host() -> None:
    engine = StoringEngine(slots=3)
    request = engine.arrive(StoredRequest("r", hashes(8)))
    assert engine.step(request, computed=128) == [10, 11, 12]
    counts: dict[str, Any] = dict(engine.side.take_counts())
    assert counts["host_full"] == 1


def test_an_offline_request_has_no_saved_blocks_after_a_turn_took_its_slots() -> None:
    engine = StoringEngine(slots=2)
    offline = engine.arrive(StoredRequest("o", hashes(2), priority=1, session_id="batch"))
    engine.step(offline, computed=32)
    engine.copied(*engine.side.copying)
    assert engine.side.saved_blocks("o") == 2
    turn = engine.arrive(StoredRequest("t", hashes(3)[2:]))
    engine.step(turn, computed=16)
    assert engine.side.saved_blocks("o") == 0 and engine.side.saved_blocks("t") == 1


def test_a_busy_copier_is_told_when_steps_begin_and_stop_computing() -> None:
    engine = StoringEngine()
    request = engine.arrive(StoredRequest("r", hashes(8)))
    request.num_computed_tokens = 16
    engine.kv_state.conversations.advance(engine.kv_state.requests["r"][1], request.block_hashes[:1])
    engine.kv_state.growing = ["r"]
    told = [engine.side.order(scheduled(*running)) for running in (["r"], ["r"], [], [], ["r"])]
    assert [None if order is None else order.beside_step for order in told] == [True, None, False, None, True]
    engine.copied(*engine.side.copying)
    assert engine.side.order(scheduled()) is None


def test_blocks_that_did_not_fit_on_the_host_are_stored_once_there_is_space() -> None:
    """The waiting block is stored although the request fills no further block."""
    engine = StoringEngine(slots=3)
    request = engine.arrive(StoredRequest("r", hashes(4)))
    assert engine.step(request, computed=64) == [10, 11, 12]
    engine.copied(*engine.side.copying)
    engine.kv_state.growing = []
    engine.kv_state.host.drop(b"h0")
    order = engine.side.order(scheduled("r"))
    assert order is not None and [copy.block for copy in order.stores] == [13]
