"""An engine without measurements starts with the latency model of its accelerator."""

import pytest

from placement.scheduling.latency_model import CONSERVATIVE, BatchWork
from placement.scheduling.latency_prior import ModelSize, prior
from placement.sizing.accelerators import ACCELERATORS, accelerator_of

H100, A40 = ACCELERATORS["H100"], ACCELERATORS["A40"]
# Llama-3.1-8B in 16 bit: 32 layers, 32 heads and 8 KV heads of 128.
EIGHT_B = ModelSize(8.0e9, 7.5e9, 2, 32 * 32 * 128, 32 * 8 * 128 * 2 * 2)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_an_accelerator_is_found_by_its_drivers_name(device: str, name: str) -> None:
    assert accelerator_of(device) is ACCELERATORS[name]


@pytest.mark.parametrize("device", ["Intel(R) Xeon(R) Processor x1", "AMD Instinct MI300X", ""])
def test_an_unknown_device_name_gives_no_accelerator(device: str) -> None:
    assert accelerator_of(device) is None


def test_every_accelerator_names_the_source_of_its_figures() -> None:
    assert all(one.source for one in ACCELERATORS.values())


def test_the_prior_of_an_8b_model_on_an_h100_predicts_plausible_times() -> None:
    model = prior(H100, EIGHT_B, 1)
    prompt, token = BatchWork.of([(8192, 0)]), BatchWork.of([(1, 8192)])
    assert 0.15 < model.seconds(prompt) < 0.6  # 14 to 55 thousand tokens a second
    assert 0.006 < model.seconds(token) < 0.025
    assert CONSERVATIVE.seconds(prompt) > 20 * model.seconds(prompt)


def test_ranks_share_the_work_and_slower_boards_take_longer() -> None:
    alone, shared = prior(H100, EIGHT_B, 1), prior(H100, EIGHT_B, 4)
    work = BatchWork.of([(8192, 8192)])
    assert shared.seconds(work) < 0.3 * alone.seconds(work)
    assert prior(A40, EIGHT_B, 1).seconds(work) > 4 * alone.seconds(work)


# Milliseconds on one H200 with Qwen3 8B's sizes (docs/measurements/gpu.md): requests that decode with 512
# tokens of context, and prompts alone.
QWEN3 = ModelSize(8.2e9, 7.6e9, 2, 36 * 32 * 128, 36 * 8 * 128 * 2 * 2)
MEASURED = {1: 4.97, 16: 5.33, 64: 6.82}
MEASURED_PROMPTS = {2048: 53, 8192: 223}


def test_the_prior_is_at_most_40_percent_slower_than_a_measured_h200_and_never_faster() -> None:
    model = prior(ACCELERATORS["H200"], QWEN3, 1)
    decodes = [1e3 * model.seconds(BatchWork.of([(1, 512)] * n)) / ms for n, ms in MEASURED.items()]
    prompts = [1e3 * model.seconds(BatchWork.of([(n, 0)])) / ms for n, ms in MEASURED_PROMPTS.items()]
    assert all(1.0 <= ratio <= 1.4 for ratio in (*decodes, *prompts)), (decodes, prompts)
