"""Two real engines drop and restore layers with requests in flight, and answer as whole engines do."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.small_model import ModelShape, make_model
from tests.workers.overload.broken import SlowToAnswer
from tests.workers.overload.together import (
    BLOCKS,
    MEET_S,
    ORDER_S,
    Request,
    SplitTogether,
    requests,
    together,
)

pytestmark = pytest.mark.engine

Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def thin_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "thin"
    make_model(out, ModelShape(layers=4, hidden=128, heads=4, head_dim=32, intermediate=512))
    return out


@pytest.fixture(scope="module")
def both(thin_model: Path) -> Iterator[SplitTogether]:
    with together(thin_model) as engines:
        yield engines


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(3)


@pytest.fixture(scope="module")
def right(both: SplitTogether, asked: list[Request]) -> Answers:
    return both.right(asked)


def test_answers_of_two_engines_that_share_layers_are_unchanged_and_the_pool_grows(
    both: SplitTogether, asked: list[Request], right: Answers
) -> None:
    both.fresh()
    whole = [engine.state() for engine in both.engines]
    both.split_in_flight(asked)
    split = [engine.until(lambda state: state["highest"] >= BLOCKS) for engine in both.engines]
    assert all(state["epoch"] == both.epoch and state["blocks"] > 1.4 * BLOCKS for state in split)
    assert all(now["parameters"] < 0.6 * old["parameters"] for now, old in zip(split, whole, strict=True))
    for engine in both.engines:
        engine.until(lambda state: state["passes"] > 5 and state["served"] > 5)
    both.restore()
    after = [engine.state() for engine in both.engines]
    assert all(state["epoch"] == 0 and state["blocks"] == BLOCKS for state in after)
    assert [state["parameters"] for state in after] == [state["parameters"] for state in whole]
    assert both.finish() == right
    assert [engine.faults() for engine in both.engines] == [[], []]


def test_answers_of_requests_with_a_common_prefix_are_unchanged_by_a_drop_and_a_restore(
    both: SplitTogether,
) -> None:
    asked = requests(5, common=100, output=80)
    right = both.right(asked)
    both.fresh()
    both.split_in_flight(asked)
    both.restore()
    assert both.finish() == right


@pytest.mark.parametrize("what", ["WithoutRegions", "WithoutExchange", "WithAPartOfTheWeights"])
def test_answers_are_wrong_if_a_part_of_layer_sharing_is_left_out(
    both: SplitTogether, asked: list[Request], right: Answers, what: str
) -> None:
    both.fresh()
    for engine in both.engines:
        engine.broken(what)
    both.split_in_flight(asked)
    both.restore()
    wrong = both.finish()
    both.fresh()
    both.drop()  # this drop is complete again
    both.restore()
    assert wrong != right


@pytest.mark.parametrize("what", ["", "WithoutEpochs"])
def test_a_message_of_an_earlier_split_is_refused(
    both: SplitTogether, asked: list[Request], right: Answers, what: str
) -> None:
    both.fresh()
    both.drop()
    both.restore()
    over = both.epoch
    both.split_in_flight(asked)
    both.second.broken(what)
    answered = both.first.late_message(1, over)
    both.second.broken("")
    both.restore()
    answers = both.finish()
    if what:
        assert answered == "taken"
        assert answers != right
    else:
        assert answered == "refused"
        assert answers == right


def test_an_engine_keeps_its_whole_model_if_its_peer_gets_no_order(
    both: SplitTogether, asked: list[Request], right: Answers
) -> None:
    both.fresh()
    both.first.hold(20)
    both.add(asked)
    both.first.until(lambda state: state["holds"])
    began = time.monotonic()
    both.tell(both.first, 0)
    state = both.first.until(lambda state: not state["pending"])
    assert time.monotonic() - began < MEET_S + 5
    assert state["epoch"] == 0 and state["blocks"] == BLOCKS
    assert both.finish() == right


def test_a_slow_peer_delays_a_drop_and_a_restore_by_a_bounded_time(
    both: SplitTogether, asked: list[Request], right: Answers
) -> None:
    """Two pieces of KV take 4 s each, but an order may take 6 s: the drop and the restore fail in time."""
    both.fresh()
    both.first.limit(6.0)
    both.begin(asked)
    both.second.broken("SlowToAnswer")
    both.tell(both.first, 0)
    both.tell(both.second, 1, again=False)
    for engine in both.engines:
        state = engine.until(lambda state: not state["pending"])
        assert state["epoch"] == 0 and state["blocks"] == BLOCKS
    both.second.broken("")
    both.drop()
    passed = [engine.state()["passes"] for engine in both.engines]
    for engine, before in zip(both.engines, passed, strict=True):
        engine.until(lambda state, before=before: state["passes"] > before + 5)  # type: ignore[misc]
    both.second.broken("SlowToAnswer")
    began = time.monotonic()
    both.tell_restore()
    both.first.until(lambda state: not state["pending"])
    assert time.monotonic() - began < 2 * SlowToAnswer.slow_s + 7.8
    for engine in both.engines:
        assert engine.until(lambda state: not state["epoch"])["blocks"] == BLOCKS
    both.second.broken("")
    both.first.limit(ORDER_S)
    assert both.finish() == right
    assert [engine.faults() for engine in both.engines] == [[], []]


def test_the_prefix_cache_survives_a_drop_and_a_restore(both: SplitTogether) -> None:
    asked = requests(17, count=4, output=30, common=200)
    right = both.right(asked)
    both.fresh()
    both.first.add(asked[:1])
    both.first.until(lambda state: not state["left"])
    answers = both.first.answers()
    for change, request in ((both.drop, asked[1]), (both.restore, asked[2])):
        change()
        before = both.first.state()["computed"]
        both.first.add([request])
        computed = both.first.until(lambda state: not state["left"])["computed"] - before
        _, prompt, output = request
        assert computed <= len(prompt) + output - 192  # the common tokens, in whole blocks
        answers |= both.first.answers()
    assert answers == {name: right[name] for name, _, _ in asked[:3]}


def test_an_idle_engine_computes_a_peers_batches_through_its_layers(both: SplitTogether) -> None:
    asked = requests(7, count=8)
    right = both.right(asked)
    both.fresh()
    both.drop()
    both.first.add(asked)
    answers = both.finish()
    both.restore()
    assert answers == right


def test_answers_are_unchanged_in_a_storm_of_drops_and_restores(both: SplitTogether) -> None:
    asked = requests(11, count=60, output=40)
    right = both.right(asked)
    answers, changes = both.storm(asked)
    assert answers == right
    assert changes >= 3
    assert [engine.faults() for engine in both.engines] == [[], []]


def test_the_survivor_of_a_killed_peer_serves_alone(
    both: SplitTogether, asked: list[Request], right: Answers
) -> None:
    """This test comes last, because no peer is left after it."""
    both.fresh()
    both.split_in_flight(asked)
    before = both.first.state()
    pid = both.second.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    alone = both.first.until(lambda state: not state["epoch"])
    both.first.until(lambda state: state["generated"] > before["generated"] or not state["left"])
    assert time.monotonic() - killed < 10
    assert alone["blocks"] == BLOCKS
    both.first.until(lambda state: not state["left"])
    answers = both.first.answers()
    assert answers == {name: right[name] for name, _, _ in asked[::2]}
    assert both.first.faults() == []
