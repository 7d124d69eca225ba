"""`conserve serve` makes a fleet of the GPUs that the driver lists."""

import yaml

from tests.workers.power.machine import GpuMachine

# A machine with GPUs has vLLM's CUDA build, which is not installed here.
PROGRAM = """
import sys
from deploy.cli.application import app
from deploy.cli.commands import serve_model
serve_model.installed = lambda package: "0.32.0"
app(["serve", "smollm2", "--print", *sys.argv[1:]])
"""


def test_two_gpus_are_a_prefiller_and_a_decoder_with_a_cap(machine: GpuMachine) -> None:
    done = machine.python(PROGRAM, "--power-cap", "200")
    assert done.returncode == 0, done.stderr
    content = yaml.safe_load(done.stdout)
    assert content["engine"]["device"] == "cuda"
    assert [(tier["role"], tier["replicas"], tier.get("power_cap_w")) for tier in content["tiers"]] == [
        ("prefill", 1, None),
        ("decode", 1, 200),
    ]
    assert content["tiers"][0]["hardware"]["accelerator"] == "A40"


def test_gpus_that_are_hidden_are_not_used(machine: GpuMachine) -> None:
    done = machine.python(f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n{PROGRAM}")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["engine"]["device"] == "cpu"
