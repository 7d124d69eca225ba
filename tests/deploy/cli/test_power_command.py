"""`conserve power` changes limits of two simulated GPUs only when told to, and undoes its changes."""

from pathlib import Path

import pytest
import yaml

from tests.workers.power.machine import DRIVER, NO_LIMITS, PERMISSION, ROOT, GpuMachine, build

pytestmark = pytest.mark.slow

CONSERVE = "import sys; from deploy.cli import main; sys.argv = ['conserve', *sys.argv[1:]]; main()"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> GpuMachine:
    return GpuMachine.of(library, tmp_path)


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    """Write a fleet file with a prefiller on the first GPU and a capped decoder on the second."""
    text = yaml.safe_load((ROOT / "configs" / "a40-paper.yaml").read_text())
    text["tiers"][1]["replicas"] = 1
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(text))
    return str(file)


def conserve(machine: GpuMachine, *arguments: str) -> tuple[int, str]:
    done = machine.python(CONSERVE, "power", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_power_plan_and_power_apply_without_yes_change_no_limit(machine: GpuMachine, fleet: str) -> None:
    code, text = conserve(machine, "plan", fleet)
    assert code == 0
    assert "decode-0" in text
    assert "300 W" in text
    assert "200 W" in text
    code, text = conserve(machine, "apply", fleet)
    assert "Nothing was changed" in text
    assert machine.limits() == [300.0, 300.0]
    assert machine.read(0, "sets") == machine.read(1, "sets") == 0


def test_power_apply_caps_the_decode_tiers_gpu_and_power_restore_undoes_it(
    machine: GpuMachine, fleet: str
) -> None:
    assert conserve(machine, "apply", fleet, "--yes")[0] == 0
    assert machine.limits() == [300.0, 200.0]
    code, text = conserve(machine, "restore")
    assert (code, machine.limits()) == (0, [300.0, 300.0])
    assert "decode-0: 200 W -> 300 W" in text
    assert "Nothing to reset" in conserve(machine, "restore")[1]


def test_power_apply_with_a_tier_caps_all_gpus_of_the_machine(machine: GpuMachine, fleet: str) -> None:
    conserve(machine, "apply", fleet, "--tier", "decode", "--yes")
    assert machine.limits() == [200.0, 200.0]


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (PERMISSION, "needs root"),
        (DRIVER, "there is no NVIDIA driver on this machine"),
        (NO_LIMITS, "takes no cap"),
    ],
)
def test_a_power_apply_that_cannot_set_every_limit_changes_none_and_says_why(
    machine: GpuMachine, fleet: str, fails: int, says: str
) -> None:
    for index in range(2):
        machine.write(index, "fails", fails)
    code, text = conserve(machine, "apply", fleet, "--yes")
    assert code == 1
    assert says in text
    assert machine.limits() == [300.0, 300.0]
