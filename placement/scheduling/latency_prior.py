"""Latency model of an engine that was not measured, from what its accelerator and its model are.

An iteration reads the weights once and the KV of all its requests, and computes with each parameter that a
token passes through. What is left out, the engine's own iterations correct (latency.SelfCorrecting).
"""

from dataclasses import dataclass

from placement.scheduling.latency_model import LatencyModel
from placement.sizing.accelerators import Accelerator

# Of what a maker states, what engines reach: large matrix products, and reading weights and KV.
COMPUTED, READ = 0.4, 0.6
ITERATION_S = 5e-3  # of the host, whatever is in it
REQUEST_S = 1e-5


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of all ranks of an iteration."""

    parameters: float  # read by an iteration
    active: float  # parameters that a token passes through
    bytes_each: float
    attention: float  # layers x heads x head size
    kv_bytes: float  # of a token


def prior(board: Accelerator, size: ModelSize, ranks: int) -> LatencyModel:
    """`ranks` share each layer; stages of a pipeline follow one another."""
    flops = board.tflops * 1e12 * COMPUTED * ranks
    bandwidth = board.bandwidth_gbs * 1e9 * READ * ranks
    pair = 4 * size.attention / flops  # a token that attends to another one
    return LatencyModel(
        per_token=2 * size.active / flops,
        per_attended=pair / 2,  # of each other, new tokens attend to half
        per_before=pair / 2,
        per_context=size.kv_bytes / bandwidth,
        constant=ITERATION_S + size.parameters * size.bytes_each / bandwidth,
        per_request=REQUEST_S,
    )
