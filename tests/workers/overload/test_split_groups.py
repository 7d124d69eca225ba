"""Three real engines drop and restore layers with requests in flight, and answers stay equal."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from deploy.small_model import ModelShape, make_model
from tests.workers.overload.together import BLOCKS, Request, SplitTogether, requests, together

pytestmark = pytest.mark.engine

SIZE = 3
LAYERS = 6


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitTogether]:
    out = tmp_path_factory.mktemp("model") / "thin"
    make_model(out, ModelShape(layers=LAYERS, hidden=128, heads=4, head_dim=32, intermediate=512))
    with together(out, SIZE) as engines:
        yield engines


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(3, count=18, output=80)


@pytest.fixture(scope="module")
def right(three: SplitTogether, asked: list[Request]) -> dict[str, list[int]]:
    return three.right(asked)


def test_answers_of_three_engines_that_share_layers_are_unchanged_and_the_pools_grow(
    three: SplitTogether, asked: list[Request], right: dict[str, list[int]]
) -> None:
    three.fresh()
    whole = [engine.state() for engine in three.engines]
    three.split_in_flight(asked)
    split = [engine.until(lambda state: state["highest"] >= BLOCKS) for engine in three.engines]
    assert all(state["epoch"] == three.epoch and state["blocks"] > 1.4 * BLOCKS for state in split)
    assert all(now["parameters"] == old["parameters"] / SIZE for now, old in zip(split, whole, strict=True))
    for engine in three.engines:
        engine.until(lambda state: state["passes"] > 5 and state["served"] > 10)
    three.restore()
    after = [engine.state() for engine in three.engines]
    assert all(state["epoch"] == 0 and state["blocks"] == BLOCKS for state in after)
    assert [state["parameters"] for state in after] == [state["parameters"] for state in whole]
    assert three.finish() == right
    assert [engine.faults() for engine in three.engines] == [[]] * SIZE


def test_answers_are_wrong_when_two_peers_share_a_region(
    three: SplitTogether, asked: list[Request], right: dict[str, list[int]]
) -> None:
    three.fresh()
    for engine in three.engines:
        engine.broken("InOneRegion")
    three.split_in_flight(asked)
    three.restore()
    wrong = three.finish()
    three.fresh()
    assert wrong != right


def test_answers_are_unchanged_in_a_storm_of_drops_and_restores(three: SplitTogether) -> None:
    asked = requests(11, count=45, output=40)
    right = three.right(asked)
    answers, changes = three.storm(asked)
    assert answers == right
    assert changes >= 3
    assert [engine.faults() for engine in three.engines] == [[]] * SIZE


def test_the_survivors_of_a_killed_member_serve_alone(
    three: SplitTogether, asked: list[Request], right: dict[str, list[int]]
) -> None:
    """This test comes last, because no group is left after it."""
    three.fresh()
    three.split_in_flight(asked, generated=40)
    survivors = three.engines[0], three.engines[2]
    before = [engine.state() for engine in survivors]
    assert all(state["left"] for state in before), "an engine without work does not notice a lost peer"
    pid = three.second.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    alone = [engine.until(lambda state: not state["epoch"]) for engine in survivors]
    for engine, seen in zip(survivors, before, strict=True):
        engine.until(lambda state, seen=seen: state["generated"] > seen["generated"] or not state["left"])
    assert time.monotonic() - killed < 10
    assert all(state["blocks"] == BLOCKS for state in alone)
    for number in (0, 2):
        engine = three.engines[number]
        engine.until(lambda state: not state["left"])
        assert engine.answers() == {name: right[name] for name, _, _ in three.own(asked, number)}
        assert engine.faults() == []
