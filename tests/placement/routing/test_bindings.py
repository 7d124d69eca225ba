"""A binding lasts as long as its conversation, but no longer than the epoch of its engine."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from placement.routing.bindings import Bindings, StaleEpoch

KEYS = st.sampled_from([f"c{i}" for i in range(6)])
ENGINES = st.sampled_from(["d0", "d1"])


class Table(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = Bindings()
        self.bound: dict[str, tuple[str, int]] = {}
        self.newest: dict[str, int] = {"d0": 0, "d1": 0}
        self.now = 0.0

    @rule(key=KEYS, engine=ENGINES, ahead=st.integers(0, 1))
    def bind(self, key: str, engine: str, ahead: int) -> None:
        epoch = self.newest[engine] + ahead  # may be an epoch that was voided
        self.now += 1
        self.table.bind(key, engine, epoch, self.now)
        self.newest[engine] = epoch
        self.voided(engine, epoch - 1)
        self.bound[key] = (engine, epoch)

    @rule(key=KEYS, engine=ENGINES)
    def bind_to_a_past_epoch(self, key: str, engine: str) -> None:
        if self.newest[engine]:
            with pytest.raises(StaleEpoch):
                self.table.bind(key, engine, self.newest[engine] - 1, self.now)

    @rule(key=KEYS)
    def end(self, key: str) -> None:
        assert (self.table.end(key) is not None) is (key in self.bound)
        self.bound.pop(key, None)

    @rule(engine=ENGINES, back=st.integers(0, 1))
    def void(self, engine: str, back: int) -> None:
        epoch = self.newest[engine] + 1 - back
        expected = {key for key, (where, e) in self.bound.items() if where == engine and e <= epoch}
        assert {binding.key for binding in self.table.void_epoch(engine, epoch)} == expected
        self.newest[engine] = max(self.newest[engine], epoch)
        self.voided(engine, epoch)

    @invariant()
    def agrees(self) -> None:
        assert len(self.table) == len(self.bound)
        for key, (engine, epoch) in self.bound.items():
            found = self.table.look_up(key)
            assert found and (found.engine, found.epoch) == (engine, epoch)
        for engine in ("d0", "d1"):
            assert set(self.table.bound_to(engine)) == {k for k, (e, _) in self.bound.items() if e == engine}

    def voided(self, engine: str, epoch: int) -> None:
        for key in [k for k, (e, at) in self.bound.items() if e == engine and at <= epoch]:
            del self.bound[key]


TestTable = Table.TestCase


def test_a_conversation_bound_again_leaves_its_old_engine() -> None:
    table = Bindings()
    table.bind("c", "d0", 1, 0.0)
    table.bind("c", "d1", 1, 1.0)
    assert table.bound_to("d0") == () and table.bound_to("d1") == ("c",)
