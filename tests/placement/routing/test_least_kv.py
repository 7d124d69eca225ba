"""The chosen decoder has the least KV in use, reservations included, among those where the conversation fits.

Evictable KV, of conversations between turns whose KV is on the host as well, does not count against what
fits.
"""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from placement.engines import Role
from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import PlacerSettings
from placement.routing.receipts import Placement, Refusal, RefusalReason, Why
from tests.placement.conftest import CURVE, engine, state

NAMES = [f"d{i}" for i in range(5)]


class RecountedFleet(RuleBasedStateMachine):
    """State machine that compares the placer with a recount of all its state from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.placer = Placer(PlacerSettings(fill=1.0, headroom_tokens=10), {"prefill": CURVE})
        self.limit: dict[str, int] = {}
        self.live: dict[str, int] = {}
        self.idle: dict[str, int] = {}
        self.epoch = dict.fromkeys(NAMES, 0)
        self.reserved: dict[str, tuple[str, int]] = {}
        self.draining: set[str] = set()
        self.seq = self.keys = 0

    def in_use(self, name: str) -> int:
        return self.live[name] + sum(tokens for where, tokens in self.reserved.values() if where == name)

    @rule(name=st.sampled_from(NAMES), limit=st.integers(50, 300))
    def up(self, name: str, limit: int) -> None:
        self.epoch[name] += 1
        lost = self.placer.engine_up(engine(name, Role.DECODE, limit, self.epoch[name]))
        assert set(lost) == {key for key, (where, _) in self.reserved.items() if where == name}
        self._forget(name)
        self.limit[name], self.live[name], self.idle[name] = limit, 0, 0

    @rule(name=st.sampled_from(NAMES))
    def down(self, name: str) -> None:
        self.placer.engine_down(name)
        self._forget(name)
        self.limit.pop(name, None)

    @precondition(lambda self: self.limit)
    @rule(data=st.data(), live=st.integers(0, 300), running=st.integers(0, 300), drain=st.booleans())
    def report(self, data: st.DataObject, live: int, running: int, drain: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.limit)))
        seen = tuple(key for key, (where, _) in self.reserved.items() if where == name)[:2]
        self.seq += 1
        idle = max(0, live - running)
        report = state(
            name,
            live,
            self.seq,
            self.epoch[name],
            confirmed=dict.fromkeys(seen, self.seq),
            draining=drain,
            idle_tokens=idle,
        )
        assert self.placer.observe(report, 0.0)
        assert not self.placer.observe(report, 0.0), "the same report twice"
        self.live[name], self.idle[name] = live, idle
        (self.draining.add if drain else self.draining.discard)(name)
        for key in seen:
            del self.reserved[key]

    @rule(tokens=st.integers(1, 120), preferred=st.sampled_from([*NAMES, None]))
    def place(self, tokens: int, preferred: str | None) -> None:
        need = tokens + 10
        fitting = {
            name: self.in_use(name)
            for name, limit in self.limit.items()
            if name not in self.draining and self.in_use(name) - self.idle[name] + need <= limit
        }
        self.keys += 1
        key = f"c{self.keys}"
        answer = self.placer.place(FirstTurn(key, tokens, preferred), 0.0)
        if not fitting:
            assert isinstance(answer, Refusal)
            return
        assert isinstance(answer, Placement)
        receipt = answer.receipt.decoder
        assert answer.decoder == receipt.chosen.engine
        assert receipt.chosen.kv_in_use == fitting[answer.decoder]
        if preferred in fitting:
            assert answer.decoder == preferred and receipt.why is Why.PREFERRED
        else:
            least = min(fitting.values())
            assert receipt.chosen.kv_in_use == least
            tied = [name for name, kv in fitting.items() if kv == least]
            assert answer.decoder == min(tied), "a tie, by name"
        others = sorted(kv for name, kv in fitting.items() if name != answer.decoder)
        assert [option.kv_in_use for option in receipt.runners_up] == others[:3]
        full = len(self.limit) - len(fitting)
        assert (receipt.considered, receipt.without_capacity) == (len(self.limit), full)
        self.reserved[key] = (answer.decoder, need)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        self.placer.release(key, 0.0)
        del self.reserved[key]

    @invariant()
    def counts_agree(self) -> None:
        for name in self.limit:
            assert self.placer.kv_in_use(name) == self.in_use(name)

    def _forget(self, name: str) -> None:
        self.draining.discard(name)
        for key in [key for key, (where, _) in self.reserved.items() if where == name]:
            del self.reserved[key]


TestPool = RecountedFleet.TestCase


@given(st.lists(st.integers(1_000, 30_000), min_size=1, max_size=60))
def test_reservations_alone_spread_a_burst_over_decoders(prompts: list[int]) -> None:
    """No engine reports during the burst. Without reservations all turns would go to one decoder."""
    placer = Placer(PlacerSettings(fill=1.0, headroom_tokens=0), {"prefill": CURVE})
    for i in range(4):
        placer.engine_up(engine(f"d{i}", kv_tokens=10_000_000))
    for i, tokens in enumerate(prompts):
        placer.place(FirstTurn(str(i), tokens), 0.0)
    held = [placer.kv_in_use(f"d{i}") for i in range(4)]
    assert max(held) - min(held) <= max(prompts)


def test_a_refusal_names_its_reason_and_a_retry_time() -> None:
    placer = Placer(PlacerSettings(fill=1.0, headroom_tokens=0), {"prefill": CURVE})
    assert_refused(placer, 10, RefusalReason.NO_DECODER)
    placer.engine_up(engine("d0", kv_tokens=100))
    assert isinstance(placer.place(FirstTurn("a", 80), 0.0), Placement)
    assert_refused(placer, 30, RefusalReason.NO_CAPACITY)
    refusal = assert_refused(placer, 200, RefusalReason.TOO_LARGE)
    assert refusal.retry_after_s == 0, "trying again cannot help"


def test_a_reservation_includes_the_kv_of_sliding_windows_and_states() -> None:
    placer = Placer(PlacerSettings(fill=1.0, headroom_tokens=0), {"prefill": CURVE})
    placer.engine_up(engine("d0", kv_tokens=1000))
    assert placer.observe(state("d0", 0, 1, kv_per_token=2, kv_per_conversation=300), 0.0)
    assert isinstance(placer.place(FirstTurn("a", 50), 0.0), Placement)
    assert placer.kv_in_use("d0") == 400
    assert isinstance(placer.place(FirstTurn("b", 100), 0.0), Placement)
    assert placer.kv_in_use("d0") == 900
    assert_refused(placer, 10, RefusalReason.NO_CAPACITY)
    assert_refused(placer, 351, RefusalReason.TOO_LARGE)


def assert_refused(placer: Placer, tokens: int, reason: RefusalReason) -> Refusal:
    refusal = placer.place(FirstTurn("x", tokens), 0.0)
    assert isinstance(refusal, Refusal) and refusal.reason is reason
    assert refusal.message and (refusal.retry_after_s > 0 or reason is RefusalReason.TOO_LARGE)
    return refusal


def test_no_turn_is_refused_only_because_of_headroom_for_its_answers() -> None:
    placer = Placer(PlacerSettings(fill=1.0, headroom_tokens=1_000), {"prefill": CURVE})
    placer.engine_up(engine("p0", Role.PREFILL))
    placer.engine_up(engine("d0", kv_tokens=20_000))
    assert isinstance(placer.place(FirstTurn("a", 15_500, answers=8), 0.0), Placement)
    assert placer.kv_in_use("d0") == 19_500


def test_each_answer_gets_headroom() -> None:
    placer = Placer(PlacerSettings(fill=1.0, headroom_tokens=10), {"prefill": CURVE})
    placer.engine_up(engine("p0", Role.PREFILL))
    placer.engine_up(engine("d0", kv_tokens=100_000))
    assert isinstance(placer.place(FirstTurn("a", 50, answers=4), 0.0), Placement)
    assert placer.kv_in_use("d0") == 90
    assert placer.place_later(LaterTurn("b", "d0", 20_000, 20_000, answers=4), 0.0).prefiller == "p0"
    assert placer.kv_in_use("d0") == 90 + 20_040
