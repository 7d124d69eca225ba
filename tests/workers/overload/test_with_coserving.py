"""Two co-serving engines drop and restore layers while iterations are aborted, and answers stay equal."""

import os
import signal
from collections.abc import Iterator

import pytest

from deploy.small_model import ModelShape, make_model
from tests.workers.overload.together import SplitTogether, requests, together

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitTogether]:
    model = tmp_path_factory.mktemp("model") / "thin"
    make_model(model, ModelShape(layers=4, hidden=128, heads=4, head_dim=32, intermediate=512))
    with together(model, coserves=True) as engines:
        yield engines


def test_answers_are_unchanged_in_a_storm_of_drops_restores_and_aborts(both: SplitTogether) -> None:
    online, offline = requests(21, count=60, output=40), requests(22, count=16, output=40)
    right = both.right([*online, *offline])
    for engine in both.engines:
        engine.interrupt(True)
    answers, changes = both.storm(online, offline)
    for engine in both.engines:
        engine.interrupt(False)
    assert answers == right
    assert changes >= 3
    for engine in both.engines:
        state = engine.state()
        assert state["aborts"] >= 3
        assert state["armed_shared"] == 0
    assert [engine.faults() for engine in both.engines] == [[], []]


def test_arrivals_are_counted_although_two_patches_wrap_one_method(both: SplitTogether) -> None:
    """Both patches of the vLLM method that receives requests take effect."""
    before = both.first.state()["arrivals"]
    both.first.add(requests(20, count=3, output=1))
    both.finish()
    assert both.first.state()["arrivals"] == before + 3


def test_offline_requests_free_their_blocks_and_wait_while_layers_are_shared(both: SplitTogether) -> None:
    online, offline = requests(23, count=6, output=30), requests(24, count=4, output=100)
    right = both.right([*online, *offline])
    both.fresh()
    both.begin(offline, priority=10)
    assert [engine.state()["running"] for engine in both.engines] == [2, 2]
    both.drop()
    both.add(online)
    for engine in both.engines:
        state = engine.until(lambda state: state["left"] == 2)  # the offline ones
        assert (state["running"], state["policy"]) == (0, "TurnsAlone")
    both.restore()
    assert both.finish() == right
    assert [engine.state()["policy"] for engine in both.engines] == ["Conserve", "Conserve"]


def test_iterations_with_shared_layers_do_not_change_the_latency_model_of_the_whole_model(
    both: SplitTogether,
) -> None:
    both.fresh()
    before = [engine.state()["observed"] for engine in both.engines]
    both.drop()
    both.add(requests(25, count=4, output=30))
    both.finish()
    assert all(
        engine.state()["observed"] > known + 20 for engine, known in zip(both.engines, before, strict=True)
    )
    both.restore()
    for engine in both.engines:
        engine.add(requests(26, count=1, output=3))
    both.finish()
    after = [engine.state()["observed"] for engine in both.engines]
    assert all(now - known <= 8 for now, known in zip(after, before, strict=True))


def test_the_survivor_of_a_killed_peer_co_serves_alone(both: SplitTogether) -> None:
    """This test comes last, because no peer is left after it."""
    online, offline = requests(27, count=8, output=60), requests(28, count=4, output=30)
    late = requests(
        29, count=1, output=10
    )  # by its pass the survivor learns of the loss, if all others ended
    right = both.right([*online, *offline, *late])
    both.fresh()
    both.add(offline, priority=10)
    both.split_in_flight(online)
    pid = both.second.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    both.first.add(late)
    both.first.until(lambda state: not state["epoch"])
    both.first.interrupt(True)
    both.first.until(lambda state: not state["left"])
    own = [name for name, _, _ in (*online[::2], *offline[::2], *late)]
    assert both.first.answers() == {name: right[name] for name in own}
    assert both.first.faults() == []
