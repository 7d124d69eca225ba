"""`conserve serve` makes a fleet of the GPUs that the driver lists."""

import pytest
import yaml

from tests.workers.power.machine import DRIVER, NO_LIMITS, NO_MEMORY, GpuMachine

SERVE = """
from deploy.cli.application import app
from deploy import machine
from deploy.cli.common import errors_as_sentences
with errors_as_sentences():
    app(["serve", "smollm2", "--print", *sys.argv[1:]])
"""
# A machine with GPUs has vLLM's CUDA build, which is not installed here.
CUDA = "import sys\n" + SERVE.replace(
    "with", "machine.installed = lambda name: '0.32.0' if name == 'vllm' else ''\nwith"
)


def test_a_fleet_on_two_gpus_has_a_prefiller_and_a_decoder_with_a_cap(machine: GpuMachine) -> None:
    done = machine.python(CUDA, "--power-cap", "200")
    assert done.returncode == 0, done.stderr
    content = yaml.safe_load(done.stdout)
    assert content["engine"]["device"] == "cuda"
    assert [(tier["role"], tier["replicas"], tier.get("power_cap_w")) for tier in content["tiers"]] == [
        ("prefill", 1, None),
        ("decode", 1, 200),
    ]
    assert content["tiers"][0]["hardware"]["accelerator"] == "A40"


def test_gpus_that_the_cpu_build_does_not_use_are_named_beside_the_fleet_file(machine: GpuMachine) -> None:
    done = machine.python(f"import sys\n{SERVE}")
    assert done.returncode == 0 and yaml.safe_load(done.stdout)["engine"]["device"] == "cpu"
    assert "There are GPUs here, and vLLM's CPU build is installed" in done.stderr


def test_no_message_about_the_cpu_build_appears_where_vllm_is_missing(machine: GpuMachine) -> None:
    done = machine.python(CUDA.replace("vllm", "other"))
    assert done.returncode == 0 and "CPU build" not in done.stderr
    assert yaml.safe_load(done.stdout)["engine"]["device"] == "cuda"


def test_the_cuda_build_without_a_gpu_serves_nothing(machine: GpuMachine) -> None:
    hidden = machine.python(f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n{CUDA}")
    assert (hidden.returncode, hidden.stdout) == (1, "")
    assert "GPUs: hidden by CUDA_VISIBLE_DEVICES; unset it" in hidden.stderr
    machine.write(0, "fails", DRIVER)
    none = machine.python(CUDA)
    assert none.returncode == 1 and none.stderr.startswith(
        "conserve: GPUs: none, and no driver; install NVIDIA's"
    )


@pytest.mark.parametrize("fails", [NO_LIMITS, NO_LIMITS | NO_MEMORY], ids=["laptop", "unified memory"])
def test_gpus_without_power_limits_serve_but_a_cap_on_them_is_refused(
    machine: GpuMachine, fails: int
) -> None:
    for index in range(2):
        machine.write(index, "fails", fails)
    done = machine.python(CUDA)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["engine"]["device"] == "cuda"
    refused = machine.python(CUDA, "--power-cap", "200")
    assert refused.returncode == 1
    assert "--power-cap: the driver of these GPUs reports no power limits: leave it out" in refused.stderr
