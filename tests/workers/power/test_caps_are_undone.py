"""A power limit changes only after its old value is on disk, and is restored, through nvidia-ml-py."""

import fcntl
import json
import signal
import subprocess
import time

import psutil
import pytest

from tests.workers.power.machine import IGNORES_LIMIT, LOST, PERMISSION, GpuMachine

pytestmark = pytest.mark.slow

APPLY = """
import sys
from pathlib import Path
from workers.power import limits
from workers.power.nvml import Gpus
from workers.power.limits import WantedLimit
path, cap, *names = sys.argv[1:]
with Gpus() as gpus:
    wanted = [WantedLimit(n, float(cap), "decode-0") for n in names]
    for outcome in limits.apply(gpus, wanted, Path(path), BOOT, "me"):
        print(outcome.done, outcome.text)
"""
RESTORE = """
import sys
from pathlib import Path
from workers.power import limits
from workers.power.nvml import Gpus
with Gpus() as gpus:
    for outcome in limits.restore(gpus, Path(sys.argv[1]), BOOT):
        print(outcome.done, outcome.text)
"""


def apply(machine: GpuMachine, cap: float, *names: str, boot: str = "limits.boot_id()") -> str:
    done = machine.python(APPLY.replace("BOOT", boot), str(machine.record), str(cap), *names)
    assert done.returncode == 0, done.stderr
    return done.stdout


def restore(machine: GpuMachine, boot: str = "limits.boot_id()") -> str:
    done = machine.python(RESTORE.replace("BOOT", boot), str(machine.record))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_caps_are_set_by_index_or_uuid_and_removed(machine: GpuMachine) -> None:
    machine.write(0, "limit_mw", 280_000)
    assert apply(machine, 200, "0", "GPU-00000001").count("True") == 2
    assert machine.limits() == [200.0, 200.0]
    assert restore(machine).count("True") == 2
    assert machine.limits() == [280.0, 300.0]
    assert restore(machine) == ""


def test_a_second_cap_keeps_the_original_limit_in_the_record(machine: GpuMachine) -> None:
    apply(machine, 200, "0")
    apply(machine, 150, "0")
    restore(machine)
    assert machine.limits() == [300.0, 300.0]


@pytest.mark.parametrize("cap", [99, 301])
def test_a_cap_outside_the_range_is_refused_and_nothing_is_recorded(machine: GpuMachine, cap: int) -> None:
    assert "accepts 100 to 300 W" in apply(machine, cap, "0")
    assert machine.read(0, "sets") == 0
    assert not machine.record.exists()


def test_a_limit_that_may_not_be_set_is_not_recorded(machine: GpuMachine) -> None:
    machine.write(0, "fails", PERMISSION)
    assert "not permitted; setting power limits needs root" in apply(machine, 200, "0", "1")
    assert machine.limits() == [300.0, 200.0]
    assert list(json.loads(machine.record.read_text())["entries"]) == ["GPU-00000001"]


def test_the_limit_of_a_lost_gpu_stays_recorded_until_it_is_restored(machine: GpuMachine) -> None:
    apply(machine, 200, "0", "1")
    machine.write(0, "fails", LOST)
    assert "still to be restored to 300 W" in restore(machine)
    machine.write(0, "fails", 0)
    assert machine.limits() == [200.0, 300.0]
    restore(machine)
    assert machine.limits() == [300.0, 300.0]


def test_a_limit_without_effect_is_reported(machine: GpuMachine) -> None:
    machine.write(0, "fails", IGNORES_LIMIT)
    assert "set to 200 W, but the GPU reports 300 W" in apply(machine, 200, "0")


def test_a_limit_that_somebody_else_set_is_not_restored(machine: GpuMachine) -> None:
    apply(machine, 200, "0")
    machine.write(0, "limit_mw", 250_000)
    assert "which somebody else set" in restore(machine)
    assert machine.limits() == [250.0, 300.0]


def test_the_error_names_gpus_that_do_not_exist(machine: GpuMachine) -> None:
    out = apply(machine, 200, "7", "GPU-nope")
    assert "no GPU 7" in out
    assert "no GPU GPU-nope" in out


def test_a_reboot_voids_the_record(machine: GpuMachine) -> None:
    apply(machine, 200, "0", boot="'before'")
    machine.write(0, "limit_mw", 300_000)  # as after a reboot
    assert restore(machine, boot="'after'") == ""
    assert apply(machine, 150, "0", boot="'after'").startswith("True")
    restore(machine, boot="'after'")
    assert machine.limits()[0] == 300.0


def test_the_old_limit_is_on_disk_before_the_new_one_is_on_the_gpu(machine: GpuMachine) -> None:
    """A process killed between both writes leaves a record and the old limit, so a restore is harmless."""
    killed = APPLY.replace("BOOT", "limits.boot_id()").replace(
        "path, cap", "import os; Gpus.set_limit = lambda *a: os.kill(os.getpid(), 9)\npath, cap"
    )
    done = machine.python(killed, str(machine.record), "200", "0")
    assert done.returncode == -signal.SIGKILL
    assert json.loads(machine.record.read_text())["entries"]["GPU-00000000"]["original_w"] == 300.0
    assert restore(machine).startswith("True")
    assert machine.limits() == [300.0, 300.0]


def test_one_process_at_a_time_changes_the_record(machine: GpuMachine) -> None:
    machine.home.mkdir()
    with machine.record.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = machine.start(APPLY.replace("BOOT", "limits.boot_id()"), str(machine.record), "200", "0")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1.5)
        assert machine.limits() == [300.0, 300.0]
    waiting.communicate(timeout=30)
    assert machine.limits() == [200.0, 300.0]


KEEPER = """
import asyncio, sys
from pathlib import Path
from workers.power.engine_power import EnginePower, PowerSettings
async def main():
    path, engine, cap, grace = sys.argv[1:]
    wanted = float(cap) if cap else None
    settings = PowerSettings(engine, "decode", ("1",), wanted, Path(path), 0.1, float(grace))
    async with EnginePower(settings):
        print("up", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def keeper(machine: GpuMachine, engine: str = "decode-0", cap: str = "200", grace: float = 0.5):  # type: ignore[no-untyped-def]
    process = machine.start(KEEPER, str(machine.record), engine, cap, str(grace))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def until(wanted: list[float], machine: GpuMachine, limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while machine.limits() != wanted:
        assert time.monotonic() < end, machine.limits()
        time.sleep(0.05)


def test_the_guard_of_a_killed_keeper_removes_its_cap(machine: GpuMachine) -> None:
    process = keeper(machine)
    until([300.0, 200.0], machine)
    process.kill()
    process.wait(10)
    until([300.0, 300.0], machine)


def test_a_guard_terminated_with_its_keeper_has_no_grace_period(machine: GpuMachine) -> None:
    """`conserve down` ends keeper and guard together like this."""
    process = keeper(machine, grace=600.0)
    until([300.0, 200.0], machine)
    (guard,) = psutil.Process(process.pid).children()
    guard.terminate()
    time.sleep(0.5)
    assert machine.limits() == [300.0, 200.0], "the keeper lives and would set it again"
    process.terminate()
    process.wait(10)
    until([300.0, 300.0], machine)


TOLD_AT_ONCE = """
import sys
from pathlib import Path
from workers.power import limits
from workers.power.engine_power import PowerSettings, start_guard
from workers.power.nvml import Gpus
from workers.power.limits import WantedLimit
path = Path(sys.argv[1])
guard = start_guard(PowerSettings("decode-0", "decode", ("1",), 200.0, path, grace_s=600.0), "me")
guard.terminate()
with Gpus() as gpus:
    limits.apply(gpus, [WantedLimit("1", 200.0, "decode-0")], path, limits.boot_id(), "me")
    print([gpu.limit_w for gpu in gpus.all()], flush=True)
guard.stdin.close()
print(guard.wait(30))
"""


def test_a_guard_terminated_before_the_cap_is_set_still_undoes_it(machine: GpuMachine) -> None:
    done = machine.python(TOLD_AT_ONCE, str(machine.record))
    assert done.stdout.splitlines() == ["[300.0, 200.0]", "0"], done.stderr
    assert machine.limits() == [300.0, 300.0]


def test_a_keeper_restarted_within_the_grace_period_keeps_the_cap(machine: GpuMachine) -> None:
    first = keeper(machine, grace=1.0)
    first.kill()
    first.wait(10)
    second = keeper(machine, grace=1.0)
    until([300.0, 200.0], machine)
    time.sleep(2.0)  # the first keeper's guard has decided by now
    assert machine.limits() == [300.0, 200.0]
    second.send_signal(signal.SIGINT)
    second.wait(10)
    until([300.0, 300.0], machine)


def test_a_cap_that_a_reloaded_driver_lost_is_set_again(machine: GpuMachine) -> None:
    process = keeper(machine)
    machine.write(1, "limit_mw", 300_000)  # the driver was loaded again
    until([300.0, 200.0], machine)
    process.send_signal(signal.SIGINT)
    process.wait(10)
    until([300.0, 300.0], machine)


def test_a_cap_that_could_not_be_set_is_tried_again(machine: GpuMachine) -> None:
    machine.write(1, "fails", IGNORES_LIMIT)
    process = keeper(machine)
    assert machine.limits() == [300.0, 300.0]
    machine.write(1, "fails", 0)
    until([300.0, 200.0], machine)
    process.send_signal(signal.SIGINT)
    process.wait(10)
    until([300.0, 300.0], machine)


def test_a_start_without_a_cap_restores_the_limit_of_an_earlier_run(machine: GpuMachine) -> None:
    apply(machine, 150, "1")
    process = keeper(machine, engine="prefill-0", cap="")
    until([300.0, 300.0], machine)
    process.kill()
    process.wait(10)
