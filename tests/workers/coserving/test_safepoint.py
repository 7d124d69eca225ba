"""The flag aborts only the iteration that it names, at a layer on which all ranks agree."""

import multiprocessing
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from workers.engine.coserving import safepoint as page
from workers.engine.coserving.safepoint import (
    Armed,
    Flag,
    SafepointAbort,
    SafepointScheduler,
    SafepointWorker,
)

LAYERS = [f"layer{index}" for index in range(12)]


@pytest.fixture
def flag() -> Iterator[Flag]:
    made = Flag(f"conserve-test-{uuid.uuid4().hex[:8]}")
    yield made
    made.remove()


def worker(flag: Flag, every: int = 1, rank: int = 0, ranks: int = 1, run_ahead: int = 0) -> SafepointWorker:
    made = SafepointWorker(flag, every, rank, ranks, run_ahead)
    tensor = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    made.register(dict.fromkeys(LAYERS, tensor))
    return made


def left_at(
    made: SafepointWorker, epoch: int, flag: Flag | None = None, raise_before: int | None = None
) -> int | None:
    """Run one iteration and return the layer at which it was aborted."""
    made.before_step(Armed(epoch) if epoch else None)
    try:
        for index, layer in enumerate(LAYERS):
            if flag is not None and index == raise_before:
                flag.raise_for(epoch)
            made.before_layer(layer)
            made.after_layer(layer)
    except SafepointAbort:
        return index
    finally:
        made.after_step()
    return None


def test_a_raised_flag_aborts_the_iteration_at_the_next_layer(flag: Flag) -> None:
    assert left_at(worker(flag), 7, flag, raise_before=5) == 5
    assert flag.aborted(7)
    assert flag.fields[page.ABORTED_LAYER] == 5
    assert flag.fields[page.ABORTS] == 1


def test_a_late_signal_aborts_no_later_iteration(flag: Flag) -> None:
    made = worker(flag)
    assert left_at(made, 7) is None
    flag.raise_for(7)
    assert left_at(made, 8) is None
    assert not flag.aborted(8)


def test_an_unarmed_iteration_is_never_aborted(flag: Flag) -> None:
    flag.raise_for(0)
    assert left_at(worker(flag), 0) is None


def test_the_flag_is_checked_every_configured_number_of_layers(flag: Flag) -> None:
    assert left_at(worker(flag, every=4), 7, flag, raise_before=5) == 8


def test_the_flag_shows_the_epoch_of_the_running_iteration(flag: Flag) -> None:
    made = worker(flag)
    made.before_step(Armed(9))
    assert flag.fields[page.RUNNING] == 9
    made.after_step()
    assert flag.fields[page.RUNNING] == 0


def test_another_process_sees_and_raises_the_same_flag(flag: Flag) -> None:
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=_raise_in_another_process, args=(flag.path.name, 11))
    other.start()
    other.join(30)
    assert flag.fields[page.RAISED] == 11
    assert left_at(worker(flag), 11) == 0


def _raise_in_another_process(name: str, epoch: int) -> None:
    Flag(name).raise_for(epoch)


def test_epochs_after_a_restart_are_higher_than_before_the_crash(flag: Flag) -> None:
    before = page.new_epoch()
    assert page.new_epoch() >= before
    assert page.unpack(page.pack(before, 63)) == (before, 63)
    assert page.pack(before + 2**30, 4095) < 2**63


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("raise_before", range(0, 12, 3))
def test_all_ranks_abort_at_the_same_layer(flag: Flag, ranks: int, raise_before: int) -> None:
    """Run ranks in threads with a collective in every layer, as in a tensor-parallel model."""
    collective = threading.Barrier(ranks)
    left: list[int | None] = [None] * ranks

    def run(rank: int) -> None:
        made = worker(flag, rank=rank, ranks=ranks)
        made.before_step(Armed(5))
        try:
            for index, layer in enumerate(LAYERS):
                if rank == ranks - 1 and index == raise_before:
                    flag.raise_for(5)  # as late as possible for the rank that decides
                made.before_layer(layer)
                collective.wait(10)
        except SafepointAbort:
            left[rank] = index

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), f"ranks parted: {left}"
    assert len(set(left)) == 1, left
    if raise_before < 9:
        assert left[0] is not None
        assert raise_before < left[0] <= raise_before + 2


STEP = SimpleNamespace(num_scheduled_tokens={"off": 1}, has_sync_kv_loads=False)


def scheduler_side(flag: Flag, seconds: float = 0.1, **more: Any) -> SafepointScheduler:
    side = SafepointScheduler(flag, **{"enabled": True, **more})
    side.worth_arming = lambda: seconds
    return side


def test_only_iterations_that_are_long_enough_are_armed(flag: Flag) -> None:
    side = scheduler_side(flag)
    first, second = side.order(STEP), side.order(STEP)
    assert first is not None and second is not None
    assert second.epoch > first.epoch
    assert side.order(replace_step(has_sync_kv_loads=True)) is None
    assert side.order(replace_step(num_scheduled_tokens={})) is None, "nothing runs"
    assert scheduler_side(flag, seconds=0.0).order(STEP) is None
    assert scheduler_side(flag, enabled=False).order(STEP) is None


def replace_step(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(STEP), **values})


def test_no_iteration_is_armed_while_layers_are_shared(flag: Flag) -> None:
    kv_io_suspended = True
    side = scheduler_side(flag, kv_io_suspended=lambda: kv_io_suspended)
    assert side.order(STEP) is None
    kv_io_suspended = False
    assert side.order(STEP) is not None


@pytest.mark.parametrize(
    ("seconds", "layers", "ahead"),
    [
        (0.0181, 36, 2),  # half a millisecond a layer
        (0.015, 80, 6),
        (0.2, 36, 2),  # never less
        (0.00301, 36, 12),
        (0.0001, 36, 18),  # never more than half of the layers
    ],
)
def test_the_host_may_run_ahead_by_a_millisecond_of_predicted_work(
    flag: Flag, seconds: float, layers: int, ahead: int
) -> None:
    order = scheduler_side(flag, seconds, layers=layers).order(STEP)
    assert order is not None and order.run_ahead == ahead
    on_cpu = scheduler_side(flag, seconds).order(STEP)
    assert on_cpu is not None and on_cpu.run_ahead == 0
