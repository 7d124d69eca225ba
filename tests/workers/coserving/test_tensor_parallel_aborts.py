"""Two tensor-parallel ranks abort at the same layer, in whatever order vLLM registers layers.

Real worker sides run on simulated devices. A device computes a layer only when both ranks have launched it,
because of the collective in each layer. It is random which host or device goes on next, and when the flag is
raised.
"""

import random
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.engine.coserving.safepoint import (
    RUN_AHEAD,
    Armed,
    Flag,
    SafepointAbort,
    SafepointWorker,
)

LAYERS = [f"layer{number}" for number in range(24)]
# vLLM registers layers by KV cache group, and deals the layers of one kind out to groups of equal size.
_SLIDING = [name for number, name in enumerate(LAYERS) if number % 6 != 5]
REGISTERED = {
    "one group": LAYERS,
    "gpt-oss": LAYERS[0::2] + LAYERS[1::2],
    "Gemma 3": [name for group in range(5) for name in _SLIDING[group::5]] + LAYERS[5::6],
}
SCHEDULES = 200


class HostWouldWaitError(Exception):
    """Error: the rank's host has to wait for its device, and tries again later."""


class Rank:
    """Host and device of a rank. `launched` and `done` count layers of the iteration."""

    def __init__(self, flag: Flag, number: int, every: int, registered: list[str], run_ahead: int) -> None:
        self.launched = self.done = 0
        self.left_at: int | None = None
        self.worker = SafepointWorker(flag, every, number, 2, RUN_AHEAD)
        tensor = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "Event", lambda: RankEvent(self))
            self.worker.register(dict.fromkeys(registered, tensor))
        self.worker.before_step(Armed(7, run_ahead))

    @property
    def over(self) -> bool:
        return self.left_at is not None or self.launched == len(LAYERS)

    def go_on(self) -> None:
        """Launch the host's next layer, or abort."""
        try:
            self.worker.before_layer(LAYERS[self.launched])
        except HostWouldWaitError:
            return
        except SafepointAbort:
            self.left_at = self.launched
            return
        self.launched += 1
        self.worker.after_layer(LAYERS[self.launched - 1])


class RankEvent:
    def __init__(self, rank: Rank) -> None:
        self._rank, self._layer = rank, 0

    def record(self) -> None:
        self._layer = self._rank.launched

    def synchronize(self) -> None:
        if self._layer > self._rank.done:
            raise HostWouldWaitError


def left_at(registered: list[str], every: int, run_ahead: int, seed: int) -> list[int | None]:
    """Return the layer at which each rank aborts an iteration whose flag is raised at a random moment."""
    rng = random.Random(seed)
    flag = Flag(f"conserve-test-{uuid.uuid4().hex[:8]}")
    ranks = [Rank(flag, number, every, registered, run_ahead) for number in range(2)]
    raise_at, raised = rng.randrange(1, len(LAYERS) - 4), False
    for _ in range(100_000):
        if all(rank.over for rank in ranks):
            break
        if not raised and max(rank.launched for rank in ranks) >= raise_at:
            flag.raise_for(7)
            raised = True
        rank = rng.choice(ranks)
        if rng.random() < 0.5:
            rank.done += rank.done < min(one.launched for one in ranks)
        elif not rank.over:
            rank.go_on()
    else:
        pytest.fail("a rank waits for ever")
    flag.close()
    flag.remove()
    return [rank.left_at for rank in ranks]


@pytest.mark.parametrize("run_ahead", [0, 6])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("model", REGISTERED)
def test_both_ranks_abort_at_the_same_layer(model: str, every: int, run_ahead: int) -> None:
    """A host may be at most `run_ahead` layers ahead of its device."""
    layers: list[Any] = [left_at(REGISTERED[model], every, run_ahead, seed) for seed in range(SCHEDULES)]
    assert [pair for pair in layers if pair[0] != pair[1]] == []
    assert any(pair[0] is not None for pair in layers)
