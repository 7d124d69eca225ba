"""Watchers of a keeper get its newest report, however slowly they read."""

import asyncio
from dataclasses import replace
from pathlib import Path

from kvtransfer.control.control_socket import ControlSocketServer, EngineCommand, Reply
from placement.engines import EngineInfo, EngineState, Role
from tests.support.waiting import until
from workers.keeper.engine_status import EngineLink, KeeperPhase, StatusStore

INFO = EngineInfo("decode-0", "decode", Role.DECODE, 5, "h:1", "h:2", "h:3", 4096, 16, 8192)
STATE = EngineState("decode-0", 5, 1, 10, 0, 0, 90, 1, 0, confirmed={"a": 1})


async def test_a_watcher_first_receives_the_full_status() -> None:
    store = StatusStore("decode-0")
    store.engine_up(INFO)
    store.engine_state(STATE)
    store.tell(KeeperPhase.SERVING)
    first = await anext(store.watch())
    assert (first.info, first.state) == (INFO, STATE)
    assert first.status.phase is KeeperPhase.SERVING


async def test_a_slow_watcher_receives_only_the_newest_report() -> None:
    store = StatusStore("decode-0")
    store.engine_up(INFO)
    reports = store.watch()
    await anext(reports)
    for seq in range(2, 6):
        store.engine_state(replace(STATE, seq=seq, confirmed={"a": 1, f"c{seq}": seq}))
    report = await anext(reports)
    assert report == store.report
    assert report.state is not None and report.state.seq == 5


async def test_an_unobserved_restart_is_reported_as_a_new_epoch() -> None:
    store = StatusStore("decode-0")
    store.engine_up(INFO)
    reports = store.watch()
    await anext(reports)
    store.engine_state(STATE)
    store.engine_down()
    store.engine_up(replace(INFO, epoch=6))
    report = await anext(reports)
    assert report.over == INFO.epoch
    assert report.info is not None and report.info.epoch == 6
    assert report.state is None


async def test_the_state_of_a_lost_engine_is_dropped() -> None:
    store = StatusStore("decode-0")
    store.engine_up(INFO)
    store.engine_state(STATE)
    store.engine_down()
    report = store.report
    assert (report.info, report.state, report.over) == (None, None, INFO.epoch)


async def test_states_of_another_epoch_are_dropped() -> None:
    store = StatusStore("decode-0")
    store.engine_up(INFO)
    store.engine_state(replace(STATE, epoch=4))
    assert store.report.state is None


async def test_a_watcher_waits_while_nothing_changes() -> None:
    store = StatusStore("decode-0")
    reports = store.watch()
    await anext(reports)
    waiting = asyncio.ensure_future(anext(reports))
    store.tell(KeeperPhase.WAITING)  # the phase that it is in already
    await asyncio.sleep(0.01)
    assert not waiting.done()
    store.tell(KeeperPhase.STARTING, "loading weights")
    report = await asyncio.wait_for(waiting, 1)
    assert report.status.detail == "loading weights"


async def test_a_connected_keeper_receives_the_engines_state_and_logs_faults_in_its_kv_bookkeeping(
    tmp_path: Path, caplog: object
) -> None:
    checked: list[str] = []

    def check(command: EngineCommand) -> Reply:
        checked.append(command.command)
        return Reply(True, ("block 3 is free and held",))

    server = ControlSocketServer(tmp_path / "engine.sock", lambda: STATE, {"check": check})
    store = StatusStore("decode-0")
    store.engine_up(INFO)
    following = asyncio.create_task(EngineLink("decode-0", tmp_path / "engine.sock").follow(store))
    await until(lambda: store.report.state == STATE)
    assert checked
    assert "block 3 is free and held" in caplog.text  # type: ignore[attr-defined]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    server.close()
