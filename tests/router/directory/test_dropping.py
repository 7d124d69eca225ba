"""The engines of a group get one order with one epoch; engines that refuse or are late are left alone."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

import pytest
from prometheus_client import REGISTRY

from placement.engines import EngineInfo, SplitState
from placement.overload.drop_plan import DropLimits, EngineShape
from placement.overload.signal import OverloadReason, OverloadState
from placement.scheduling.latency_model import LatencyModel
from router.directory.api.messages import EngineRecord
from router.directory.dropping import SILENT_S, UNWILLING_S, Dropper
from router.directory.fleet import unreported
from tests.support.engines import info, state

SHAPE = EngineShape(
    layers=8,
    layer_bytes=3e6,
    kv_tokens=10_000,
    kv_bytes_per_token=8_192,
    activation_bytes=1_024,
    link_bytes_per_s=1e9,
    latency=LatencyModel(1e-6, 1e-10, 1e-8, 0.01),
)
LACKING = OverloadState(True, OverloadReason.KV_SHORT, 1.5, 0.9, 0.0, lacking_tokens=500)
OVER = OverloadState.initial()


def in_split(name: str, epoch: int, *partners: str) -> SplitState:
    kv_tokens = SHAPE.kv_each(1 + len(partners))
    return SplitState(f"{name}:1", SHAPE, epoch, kv_tokens, newest=epoch, partners=partners)


class SharingEngines:
    """Stands in for the keepers of two or more engines, which carry out orders or refuse them."""

    def __init__(self, names: Sequence[str] = ("d0", "d1")) -> None:
        self.refuses: set[str] = set()
        self.slow: asyncio.Event | None = None  # if set, engines carry out orders once the event is set
        self.later: list[asyncio.Task[None]] = []
        self.told: list[tuple[str, str, int, int, tuple[str, ...]]] = []
        self._records = {
            name: EngineRecord(info(name), replace(state(name, 1, live=9_000), running=4), suspect=False)
            for name in names
        }
        for name in self._records:
            self.set(name, SplitState(f"{name}:1", SHAPE, 0, SHAPE.kv_tokens))

    def records(self) -> list[EngineRecord]:
        return list(self._records.values())

    def set(self, name: str, split: SplitState | None) -> None:
        record = self._records[name]
        self._records[name] = replace(record, state=replace(record.state, split=split))

    def record(self, name: str) -> EngineRecord:
        return self._records[name]

    def put(self, name: str, record: EngineRecord) -> None:
        self._records[name] = record

    def holds(self, name: str, tokens: int) -> None:
        record = self._records[name]
        self._records[name] = replace(record, state=replace(record.state, live_tokens=tokens))

    def epochs(self) -> list[int]:
        return [record.state.split.epoch for record in self.records() if record.state.split]

    async def share(self, info: EngineInfo, epoch: int, members: tuple[str, ...], part: int) -> None:
        if not members:
            self.told.append(("restore", info.engine, epoch, 0, ()))
            self._happens(info.engine, SplitState(f"{info.engine}:1", SHAPE, 0, SHAPE.kv_tokens))
            return
        self.told.append(("drop", info.engine, epoch, part, members))
        if info.engine in self.refuses:
            raise OSError("no")
        others = (one for one in members if one != members[part])
        self._happens(info.engine, in_split(info.engine, epoch, *others))

    def _happens(self, name: str, split: SplitState) -> None:
        if self.slow is None or self.slow.is_set():
            self.set(name, split)
        else:
            self.later.append(asyncio.create_task(self._set_later(self.slow, name, split)))

    async def _set_later(self, when: asyncio.Event, name: str, split: SplitState) -> None:
        await when.wait()
        self.set(name, split)


def one_round(dropper: Dropper, state: OverloadState) -> None:
    async def until_settled() -> None:
        dropper.look(state)
        await dropper.settled()

    asyncio.run(until_settled())


def test_two_engines_share_layers_in_an_overload_and_are_restored_after_it() -> None:
    two = SharingEngines()
    dropper = Dropper(DropLimits(1.0), two.records, two.share)
    one_round(dropper, LACKING)
    both = ("d0:1", "d1:1")
    assert [(what, engine, part, members) for what, engine, _, part, members in two.told] == [
        ("drop", "d0", 0, both),
        ("drop", "d1", 1, both),
    ]
    first, second = two.epochs()
    assert first == second > 0
    one_round(dropper, LACKING)
    assert len(two.told) == 2  # the drop has freed what was lacking
    for name in ("d0", "d1"):
        two.holds(name, 2_000)
    one_round(dropper, OVER)
    assert [(what, engine, epoch) for what, engine, epoch, _, _ in two.told[2:]] == [
        ("restore", "d0", first),
        ("restore", "d1", first),
    ]
    assert two.epochs() == [0, 0]


def test_three_engines_share_layers_if_two_would_not_free_enough_kv() -> None:
    three = SharingEngines(("d0", "d1", "d2"))
    for name in (
        "d0",
        "d1",
        "d2",
    ):  # a third of the layers is worth more than half of them only if they are large
        three.set(name, SplitState(f"{name}:1", replace(SHAPE, layer_bytes=3e7), 0, SHAPE.kv_tokens))
    dropper = Dropper(DropLimits(1.0), three.records, three.share)
    one_round(dropper, replace(LACKING, lacking_tokens=100_000))
    (members,) = {members for _, _, _, _, members in three.told}
    assert sorted(members) == ["d0:1", "d1:1", "d2:1"]
    assert all(members[part] == f"{engine}:1" for _, engine, _, part, _ in three.told)
    (epoch,) = set(three.epochs())
    assert epoch > 0 and len(three.told) == 3
    for name in ("d0", "d1", "d2"):
        three.holds(name, 2_000)
    one_round(dropper, OVER)
    assert three.epochs() == [0, 0, 0]


def test_an_engine_that_refuses_to_share_layers_is_not_asked_again_for_a_while() -> None:
    two, now = SharingEngines(), [0.0]
    dropper = Dropper(DropLimits(1.0), two.records, two.share, lambda: now[0])
    two.refuses = {"d1"}
    one_round(dropper, LACKING)
    two.set("d0", SplitState("d0:1", SHAPE, 0, SHAPE.kv_tokens))  # its peer did not join
    told = len(two.told)
    one_round(dropper, LACKING)
    assert len(two.told) == told
    two.refuses, now[0] = set(), UNWILLING_S + 1
    one_round(dropper, LACKING)
    assert two.epochs()[0] == two.epochs()[1] > 0


def test_an_engine_that_lost_its_group_is_not_asked_again_for_a_while() -> None:
    """The next group may be lost too, and after each loss the engines compute all requests again."""
    two, now = SharingEngines(), [0.0]
    dropper = Dropper(DropLimits(1.0), two.records, two.share, lambda: now[0])
    one_round(dropper, LACKING)
    assert len(two.told) == 2
    for name in ("d0", "d1"):
        two.set(name, SplitState(f"{name}:1", SHAPE, 0, SHAPE.kv_tokens))
    one_round(dropper, LACKING)
    assert len(two.told) == 2
    now[0] += UNWILLING_S + 1
    one_round(dropper, LACKING)
    assert len(two.told) == 4
    one_round(dropper, OVER)  # the group ended by an order, so that it was not lost
    one_round(dropper, LACKING)
    assert [what for what, *_ in two.told[4:]] == ["restore", "restore", "drop", "drop"]


def test_no_two_groups_have_the_same_epoch() -> None:
    two, now = SharingEngines(), [0.0]
    dropper = Dropper(DropLimits(1.0), two.records, two.share, lambda: now[0])
    seen = []
    for _ in range(3):
        one_round(dropper, OverloadState.initial())  # the dropper sees that the group was lost
        now[0] += UNWILLING_S + 1
        one_round(dropper, LACKING)
        seen.append(two.epochs()[0])
        for name in ("d0", "d1"):
            two.set(name, SplitState(f"{name}:1", SHAPE, 0, SHAPE.kv_tokens))
    assert sorted(set(seen)) == seen
    two.set("d0", SplitState("d0:1", SHAPE, 0, SHAPE.kv_tokens, newest=seen[-1] + 5))
    one_round(Dropper(DropLimits(1.0), two.records, two.share), LACKING)  # after a restart of the directory
    assert two.epochs()[0] > seen[-1] + 5


def split_in(two: SharingEngines, epoch: int) -> None:
    for name, partner in (("d0", "d1:1"), ("d1", "d0:1")):
        two.set(name, in_split(name, epoch, partner))
        two.holds(name, 9_000)


def test_an_engine_is_restored_once_its_peer_has_been_silent_for_long() -> None:
    two, now = SharingEngines(), [0.0]
    split_in(two, 7)
    heard = two.record("d1")
    two.put("d1", EngineRecord(heard.info, unreported(heard.info), suspect=True))
    dropper = Dropper(DropLimits(1.0), two.records, two.share, lambda: now[0])
    one_round(dropper, LACKING)
    now[0] = SILENT_S - 1
    one_round(dropper, OVER)
    assert two.told == []
    two.put("d1", heard)  # both report: the pair stays, because its KV is needed
    now[0] = SILENT_S + 1
    one_round(dropper, LACKING)
    assert two.told == []
    two.put("d1", replace(heard, suspect=True))
    one_round(dropper, LACKING)
    assert two.told == []
    now[0] += SILENT_S + 1
    one_round(dropper, LACKING)
    assert [(what, engine, epoch) for what, engine, epoch, _, _ in two.told] == [("restore", "d0", 7)]


def test_after_a_restart_all_pairs_are_restored_even_if_two_have_the_same_epoch() -> None:
    four = SharingEngines(("d0", "d1", "d2", "d3"))
    heard = {}
    for name, partner in (("d2", "d3:1"), ("d3", "d2:1")):  # as ordered by the directory before its restart
        four.set(name, in_split(name, 1, partner))
        heard[name] = four.record(name)
        four.put(name, EngineRecord(heard[name].info, unreported(heard[name].info), suspect=True))
    dropper = Dropper(DropLimits(1.0), four.records, four.share)
    one_round(dropper, LACKING)
    for name, record in heard.items():
        four.put(name, record)
    assert four.epochs() == [1, 1, 1, 1]  # the directory could not know that another pair has this epoch
    for name in ("d0", "d1", "d2", "d3"):
        four.holds(name, 100)
    one_round(dropper, OVER)
    assert four.epochs() == [0, 0, 0, 0]


def test_two_engines_can_begin_to_share_layers_while_two_others_are_restored() -> None:
    four = SharingEngines(("d0", "d1", "d2", "d3"))
    split_in(four, 7)
    heard = [four.record(name) for name in ("d2", "d3")]
    for record in heard:  # only the other pair is restored first
        four.set(record.info.engine, None)
    dropper = Dropper(DropLimits(1.0), four.records, four.share)

    async def rounds() -> None:
        four.slow = asyncio.Event()
        for name in ("d0", "d1"):
            four.holds(name, 100)
        dropper.look(OVER)
        await asyncio.sleep(0.01)
        assert [told[:2] for told in four.told] == [("restore", "d0"), ("restore", "d1")]
        for record in heard:
            four.put(record.info.engine, record)
        much = replace(LACKING, lacking_tokens=100_000)
        dropper.look(much)  # the demand returns before the parameters do
        await asyncio.sleep(0.01)
        assert [told[:2] for told in four.told[2:]] == [("drop", "d2"), ("drop", "d3")]
        dropper.look(much)
        dropper.look(OVER)
        await asyncio.sleep(0.01)
        assert len(four.told) == 4
        four.slow.set()
        await dropper.settled()
        assert four.epochs()[:2] == [0, 0] and four.epochs()[2] == four.epochs()[3] > 7

    asyncio.run(rounds())


def test_no_log_line_says_that_nothing_is_dropped_while_a_drop_is_in_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = SharingEngines()
    dropper = Dropper(DropLimits(1.0), two.records, two.share)

    async def rounds() -> None:
        two.slow = asyncio.Event()
        for _ in range(2):
            dropper.look(LACKING)
            await asyncio.sleep(0.01)
        assert "nothing is dropped" not in caplog.text
        two.slow.set()
        await dropper.settled()
        dropper.look(replace(LACKING, lacking_tokens=100_000))
        assert "nothing is dropped reason=split" in caplog.text

    asyncio.run(rounds())


def test_no_second_drop_begins_while_one_in_progress_will_free_enough_kv() -> None:
    four = SharingEngines(("d0", "d1", "d2", "d3"))
    dropper = Dropper(DropLimits(1.0, reserve=0.0), four.records, four.share)

    async def rounds() -> None:
        four.slow = asyncio.Event()
        dropper.look(LACKING)
        await asyncio.sleep(0.01)
        assert len(four.told) == 2
        dropper.look(LACKING)
        await asyncio.sleep(0.01)
        assert len(four.told) == 2
        four.slow.set()
        await dropper.settled()
        dropper.look(replace(LACKING, lacking_tokens=100_000))  # more than the first drop freed
        await dropper.settled()
        assert len(four.told) == 4

    asyncio.run(rounds())


def rounds_failed() -> float:
    return REGISTRY.get_sample_value("conserve_overload_rounds_failed_total") or 0.0


def test_parameter_drops_go_on_after_a_round_that_failed() -> None:
    two = SharingEngines()
    rounds = chain([None], repeat(LACKING))
    before = rounds_failed()
    dropper = Dropper(DropLimits(1.0), two.records, two.share)

    async def for_a_while() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.5):
                await dropper.run(lambda: next(rounds))  # type: ignore[arg-type,return-value]

    asyncio.run(for_a_while())
    assert len(two.told) == 2
    assert rounds_failed() == before + 1
