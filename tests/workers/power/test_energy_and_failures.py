"""Energy comes from the GPU's counter; without GPUs or permission an engine serves, and the log says why."""

import pytest

from tests.workers.power.machine import DRIVER, NO_ENERGY, NO_LIMITS, PERMISSION, GpuMachine

SERVE = """
import asyncio, logging, sys
from pathlib import Path
from prometheus_client import generate_latest
from workers.power.engine_power import EnginePower, PowerSettings
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
path, cap, *gpus = sys.argv[1:]
async def main():
    wanted = float(cap) if cap else None
    settings = PowerSettings("decode-0", "decode", tuple(gpus), wanted, Path(path), 0.05, 0.0)
    async with EnginePower(settings):
        await asyncio.sleep(0.3)
        if gpus and STEP:
            step()
            await asyncio.sleep(0.3)
    print(generate_latest().decode())
STEP = False
"""
STEP = """
import struct, os
STEP = True
def step():
    with open(os.environ["STAND_IN_GPUS"], "r+b") as file:
        for index in range(2):
            file.seek(index * 136 + 128)
            file.write(struct.pack("Q", 1_000_000 + 2_500 * (index + 1)))
"""


def served(machine: GpuMachine, cap: str, *gpus: str, step: bool = False) -> str:
    code = SERVE + (STEP if step else "") + "asyncio.run(main())\n"
    done = machine.python(code, str(machine.record), cap, *gpus)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_energy_is_the_increase_of_the_counters(machine: GpuMachine) -> None:
    out = served(machine, "", "0", "1", step=True)
    assert 'conserve_energy_joules_total{engine="decode-0",role="decode"} 7.5' in out
    assert 'conserve_power_watts{engine="decode-0"} 150.0' in out
    assert 'conserve_power_limit_watts{engine="decode-0"} 600.0' in out


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (PERMISSION, "not permitted; setting power limits needs root"),
        (DRIVER, "there is no NVIDIA driver on this machine"),
        (NO_LIMITS, "the driver of this GPU reports no power limits, so that it takes no cap"),
    ],
)
def test_a_failed_cap_is_logged_and_counted_and_serving_continues(
    machine: GpuMachine, fails: int, says: str
) -> None:
    machine.write(0, "fails", fails)
    out = served(machine, "200", "0")
    assert says in out
    assert 'conserve_power_caps_not_done_total{engine="decode-0"} 1.0' in out
    assert machine.limits() == [300.0, 300.0]


def test_an_engine_serves_on_a_machine_without_the_nvml_library(machine: GpuMachine) -> None:
    empty = machine.home
    empty.mkdir()
    bare = GpuMachine(empty, machine.state, machine.home)
    assert "there is no NVIDIA driver on this machine" in served(bare, "200", "0")


def test_a_gpu_without_an_energy_counter_is_logged_once(machine: GpuMachine) -> None:
    machine.write(0, "fails", NO_ENERGY)
    out = served(machine, "200", "0")
    assert out.count("reason='energy of GPU-00000000: Not Supported'") == 1
    assert machine.read(0, "sets") == 2


def test_an_engine_without_gpus_does_not_use_nvml(machine: GpuMachine) -> None:
    machine.write(0, "fails", DRIVER)
    out = served(machine, "200")
    assert "NVIDIA" not in out


def test_visible_gpus_are_those_that_cuda_visible_devices_names() -> None:
    from workers.power.engine_power import visible_gpus

    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}) == ("2", "GPU-abc")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({}) == ()
