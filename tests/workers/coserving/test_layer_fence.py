"""The host runs at most a fixed number of layers ahead, however slow the device is."""

from itertools import product

import pytest

from tests.support.device import LateCuda
from workers.engine.coserving.safepoint import RUN_AHEAD, LayerFence

LAYERS = 5
PROGRESS = (0, 1, 9)  # kernels that the device has done by the next layer: none, one, all


def iteration(
    cuda: LateCuda, fence: LayerFence, ahead: int, every: int, progress: tuple[int, ...], leaves_at: int
) -> list[int]:
    """Run layers as an armed safepoint does; return the launched but unfinished layers at each check.

    After each check, one more layer is launched.
    """
    behind = []
    fence.begin(ahead)
    began = len(cuda.compute.launched)
    for layer in range(LAYERS):
        if layer % every == 0:
            fence.wait()
            behind.append(layer - max(0, cuda.compute.done - began))
            if layer == leaves_at:
                break
        cuda.compute.launch(lambda: None)
        fence.passed()
        cuda.compute.finish(min(len(cuda.compute.launched), cuda.compute.done + progress[layer]))
    return behind


@pytest.mark.parametrize(("every", "ahead"), [(1, RUN_AHEAD), (1, 1), (2, RUN_AHEAD), (3, 1)])
def test_the_host_stays_within_its_lead_however_the_device_progresses(every: int, ahead: int) -> None:
    """The second iteration reuses events that the device may not have reached in the aborted first one."""
    for leaves_at in range(LAYERS + 1):
        for progress in product(PROGRESS, repeat=LAYERS):
            cuda = LateCuda()
            fence = LayerFence(cuda.Event)
            first = iteration(cuda, fence, ahead, every, progress, leaves_at)
            second = iteration(cuda, fence, ahead, every, progress[::-1], LAYERS)
            assert max(first) < ahead and max(second) < ahead, (leaves_at, progress, first, second)


def test_without_the_fence_the_host_finishes_before_the_device_starts() -> None:
    cuda = LateCuda()
    assert iteration(cuda, LayerFence(cuda.Event), LAYERS, 1, (0,) * LAYERS, LAYERS) == [0, 1, 2, 3, 4]


def test_the_host_never_waits_for_a_fast_device() -> None:
    cuda = LateCuda()
    assert iteration(cuda, LayerFence(cuda.Event), 1, 1, (9,) * LAYERS, LAYERS) == [0] * LAYERS
