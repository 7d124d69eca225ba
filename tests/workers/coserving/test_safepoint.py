"""The flag aborts the iteration it names, at a layer all ranks agree on, and no other."""

import multiprocessing
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from workers.coserving import safepoint as page
from workers.coserving.safepoint import Armed, Flag, SafepointAbort, SafepointScheduler, SafepointWorker

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
    """Runs one iteration; the layer it left at."""
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


def test_a_raised_flag_ends_the_iteration_at_the_next_layer(flag: Flag) -> None:
    assert left_at(worker(flag), 7, flag, raise_before=5) == 5
    assert flag.aborted(7)
    assert flag.fields[page.ABORTED_LAYER] == 5
    assert flag.fields[page.ABORTS] == 1


def test_a_late_signal_stops_no_later_iteration(flag: Flag) -> None:
    made = worker(flag)
    assert left_at(made, 7) is None
    flag.raise_for(7)
    assert left_at(made, 8) is None
    assert not flag.aborted(8)


def test_an_unarmed_iteration_is_never_left(flag: Flag) -> None:
    flag.raise_for(0)
    assert left_at(worker(flag), 0) is None


def test_checks_are_as_far_apart_as_asked(flag: Flag) -> None:
    assert left_at(worker(flag, every=4), 7, flag, raise_before=5) == 8


def test_the_running_epoch_is_shown_while_it_runs(flag: Flag) -> None:
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


def test_epochs_of_a_restart_are_past_those_of_the_crash(flag: Flag) -> None:
    before = page.new_epoch()
    assert page.new_epoch() >= before
    assert page.unpack(page.pack(before, 63)) == (before, 63)
    assert page.pack(before + 2**30, 4095) < 2**63


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("raise_before", range(0, 12, 3))
def test_all_ranks_leave_at_the_same_layer(flag: Flag, ranks: int, raise_before: int) -> None:
    """Ranks in threads, with a collective in every layer, as in a tensor parallel model."""
    collective = threading.Barrier(ranks)
    left: list[int | None] = [None] * ranks

    def run(rank: int) -> None:
        made = worker(flag, rank=rank, ranks=ranks)
        made.before_step(Armed(5))
        try:
            for index, layer in enumerate(LAYERS):
                if rank == ranks - 1 and index == raise_before:
                    flag.raise_for(5)  # as late as can be for the rank that decides
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


def test_only_steps_with_offline_requests_or_that_yield_are_armed(flag: Flag) -> None:
    side = SafepointScheduler(flag, enabled=True)
    side.on_new_request(SimpleNamespace(request_id="off", priority=1))
    side.on_new_request(SimpleNamespace(request_id="on", priority=0))

    def step(*requests: str, sync: bool = False) -> SimpleNamespace:
        return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(requests, 1), has_sync_kv_loads=sync)

    assert side.order(step("on")) is None
    first, second = side.order(step("on", "off")), side.order(step("off"))
    assert first is not None
    assert second is not None
    assert second.epoch > first.epoch
    assert side.order(step("off", sync=True)) is None
    side.on_finished(SimpleNamespace(request_id="off"), [])
    assert side.order(step("off")) is None
    side.yields = True
    assert side.order(step("on")) is not None
    assert side.order(step("on", sync=True)) is None
    assert side.order(step()) is None, "nothing runs"


def test_no_step_is_armed_while_layers_are_shared(flag: Flag) -> None:
    fenced = True
    side = SafepointScheduler(flag, enabled=True, fenced=lambda: fenced)
    side.on_new_request(SimpleNamespace(request_id="off", priority=1))
    step = SimpleNamespace(num_scheduled_tokens={"off": 1}, has_sync_kv_loads=False)
    assert side.order(step) is None
    fenced = False
    assert side.order(step) is not None
