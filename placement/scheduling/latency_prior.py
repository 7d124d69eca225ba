"""Latency prior: the estimated latency model of an engine without measurements, from data sheets.

An iteration reads the weights once, reads the KV of all its requests, and computes with each parameter that a
token passes through. `latency_model.SelfCorrecting` corrects the estimate by the engine's own iterations.
"""

from dataclasses import dataclass

from placement.scheduling.latency_model import LatencyModel
from placement.sizing.accelerators import Accelerator

# Shares of the data-sheet figures that engines reach: in matrix products, and in reading weights and KV. An
# H200 reached 0.62 and 0.75 (docs/measurements/gpu.md).
COMPUTED, READ = 0.55, 0.75
ITERATION_S = 1e-3  # host time of an iteration that does not overlap with the device's work
ARMED_S = 5e-4  # added to an armed iteration: it has no whole CUDA graph, and the host waits for the device
REQUEST_S = 1e-5  # host time for each request


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model, summed over all ranks."""

    parameters: float  # parameters that an iteration reads
    active: float  # parameters that a token passes through
    bytes_each: float  # bytes of a parameter
    attention: float  # layers x heads x head size
    kv_bytes: float  # bytes of KV of a token


def prior(board: Accelerator, size: ModelSize, ranks: int) -> LatencyModel:
    """Return the estimated latency model for this accelerator and model; `ranks` share each layer."""
    flops = board.tflops * 1e12 * COMPUTED * ranks
    bandwidth = board.bandwidth_gbs * 1e9 * READ * ranks
    pair = 4 * size.attention / flops  # seconds for a token to attend to another one
    return LatencyModel(
        per_token=2 * size.active / flops,
        per_attended=pair / 2,  # new tokens attend to half of each other
        per_before=pair / 2,
        per_context=size.kv_bytes / bandwidth,
        constant=ITERATION_S + size.parameters * size.bytes_each / bandwidth,
        per_request=REQUEST_S,
        armed=ARMED_S,
    )
