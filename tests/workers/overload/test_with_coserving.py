"""On real vLLM: two engines that co-serve share their layers and have them all again, while iterations with
offline requests end at safepoints. Every answer equals that of whole engines that nobody interrupts."""

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


def test_a_storm_of_drops_restores_and_aborts(both: SplitTogether) -> None:
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


def test_offline_work_waits_while_layers_are_shared(both: SplitTogether) -> None:
    online, offline = requests(23, count=6, output=30), requests(24, count=4, output=10)
    right = both.right([*online, *offline])
    both.fresh()
    both.drop()
    both.add(offline, priority=10)
    both.add(online)
    for engine in both.engines:
        engine.until(lambda state: state["left"] == 2)  # the offline ones
    assert [engine.state()["running"] for engine in both.engines] == [0, 0]
    both.restore()
    assert both.finish() == right
