"""Watchers are told everything that matters, however slowly they read."""

import asyncio
from dataclasses import replace

from placement.engines import EngineInfo, EngineState, Role
from workers.board import Board, Change, Phase, merge

INFO = EngineInfo("decode-0", "decode", Role.DECODE, 5, "h:1", "h:2", "h:3", 4096, 16, 8192)
STATE = EngineState("decode-0", 5, 1, 10, 0, 0, 90, 1, 0, confirmed=("a",))


async def test_a_watcher_first_gets_all_that_is_known() -> None:
    board = Board("decode-0")
    board.engine_up(INFO)
    board.engine_state(STATE)
    board.tell(Phase.SERVING)
    first = await anext(board.watch())
    assert (first.up, first.state) == (INFO, STATE)
    assert first.status is not None and first.status.phase is Phase.SERVING


async def test_a_slow_watcher_loses_no_confirmation() -> None:
    board = Board("decode-0")
    board.engine_up(INFO)
    changes = board.watch()
    await anext(changes)
    for seq, name in enumerate(("a", "b", "a", "c"), start=1):
        board.engine_state(replace(STATE, seq=seq, confirmed=(name,), parked=(name,)))
    change = await anext(changes)
    assert change.state is not None
    assert change.state.seq == 4
    assert change.state.confirmed == change.state.parked == ("a", "b", "c")


async def test_a_restart_while_nobody_reads_is_told_as_down_and_up() -> None:
    board = Board("decode-0")
    board.engine_up(INFO)
    changes = board.watch()
    await anext(changes)
    board.engine_state(STATE)
    board.engine_down()
    board.engine_up(replace(INFO, epoch=6))
    change = await anext(changes)
    assert change.down == INFO
    assert change.up is not None and change.up.epoch == 6
    assert change.state is None


def test_a_state_of_the_epoch_before_does_not_survive_an_engine_that_went() -> None:
    merged = merge(Change(state=STATE), Change(down=INFO))
    assert merged == Change(down=INFO)


async def test_states_of_another_epoch_are_dropped() -> None:
    board = Board("decode-0")
    board.engine_up(INFO)
    board.engine_state(replace(STATE, epoch=4))
    assert board.state is None


async def test_nothing_new_means_waiting() -> None:
    board = Board("decode-0")
    changes = board.watch()
    await anext(changes)
    waiting = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    board.tell(Phase.STARTING, "loading weights")
    change = await asyncio.wait_for(waiting, 1)
    assert change.status is not None and change.status.detail == "loading weights"
