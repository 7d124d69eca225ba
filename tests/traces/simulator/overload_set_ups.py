"""The KunServe paper's set-ups: Qwen2.5-14B on 8 A800, Qwen2.5-72B on 2 x 8 H800, BurstGPT-like arrivals.

Every constant names its source; none was chosen by a result. Lengths and arrivals are drawn from the
statistics that the paper states, so they are synthetic.
"""

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from benchmarks.overload import LONG_ANSWERS, Lengths
from placement.engines import Role
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.latency_model import LatencyModel
from placement.sizing.power_curve import PowerCurve
from traces import generators
from traces.format import TraceConversation
from traces.simulator.dropping import DroppingSettings
from traces.simulator.kv import Pressure
from traces.simulator.metrics import percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier

GIB = 1 << 30
# Assumed: large matrix products reach 60 % of the data sheet's rate, and reading memory 80 %.
COMPUTE_SHARE, BANDWIDTH_SHARE, NETWORK_SHARE = 0.6, 0.8, 0.8
ITERATION_S = 3e-3  # assumed: what an iteration takes in addition to computing and reading
PER_REQUEST_S = 2e-5  # assumed: sampling and bookkeeping of a request in an iteration
# Assumed: an iteration with a LongBench prompt on full KV then takes 0.22 s, as the paper says.
CHUNK_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model, from its config.json and its model card."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    weights_gib: float  # paper, table 1
    vocabulary: int = 152_064

    @property
    def kv_bytes_per_token(self) -> float:
        return 2.0 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def layer_bytes(self) -> float:
        """Return the bytes of a layer's parameters; embedding and output stay on every engine."""
        return (self.weights_gib * GIB - 2 * self.vocabulary * self.hidden * 2) / self.layers


QWEN_14B = Model("Qwen2.5-14B", 48, 5_120, 40, 8, 128, weights_gib=28.0)
QWEN_72B = Model("Qwen2.5-72B", 80, 8_192, 64, 8, 128, weights_gib=136.0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Engines of one model on one kind of GPU."""

    name: str
    model: Model
    engines: int
    gpus: int  # per engine
    flops: float  # per GPU, dense, 16 bit: data sheet
    bandwidth: float  # of a GPU's memory, bytes/s: data sheet
    network: float  # between engines, bytes/s: paper, table 2
    tensor_share: float  # assumed: share of their summed rate that GPUs reach together
    utilisation: float = 0.9  # vLLM's default share of a GPU's memory
    reserve_gib: float = 4.0  # assumed: for activations, on each GPU

    def profile(self) -> EngineProfile:
        model = self.model
        computing = self.gpus * self.flops * COMPUTE_SHARE * self.tensor_share
        reading = self.gpus * self.bandwidth * BANDWIDTH_SHARE
        kv = self.gpus * (80 * self.utilisation - self.reserve_gib) - model.weights_gib
        latency = LatencyModel(
            per_token=model.layers * model.layer_bytes / computing,
            per_attended=4.0 * model.layers * model.heads * model.head_dim / computing,
            per_context=model.kv_bytes_per_token / reading,
            constant=model.weights_gib * GIB / reading + ITERATION_S,
            per_request=PER_REQUEST_S,
        )
        return EngineProfile(
            latency=latency,
            power=PowerCurve(400.0 * self.gpus, 60.0 * self.gpus, 300.0 * self.gpus, 400.0 * self.gpus),
            chunk_tokens=CHUNK_TOKENS,
            kv_tokens=int(kv * GIB / model.kv_bytes_per_token),
            kv_bytes_per_token=model.kv_bytes_per_token,
            network_bytes_per_s=self.network * NETWORK_SHARE,
            host_bytes_per_s=self.gpus * 25e9,  # PCIe 4.0 x16, 80 % of its rate
            max_turns=1_024,  # the paper tunes it; vLLM's 256 would limit turns before the KV does
            layers=model.layers,
            layer_bytes=model.layer_bytes,
            activation_bytes=2.0 * model.hidden,
        )

    def fleet(self) -> SimulatedFleet:
        return SimulatedFleet((SimulatedTier("engine", Role.MIXED, self.engines, self.profile()),))


A800 = Cluster("8 x A800", QWEN_14B, 8, 1, 312e12, 2.04e12, 25e9, tensor_share=1.0)
H800 = Cluster("2 x 8 H800", QWEN_72B, 4, 4, 989e12, 3.35e12, 50e9, tensor_share=0.7)


LONG_BENCH = Lengths("LongBench", 5_900, 499, 0.7, 0.7, 30_000)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Poisson arrivals whose rate doubles at 45 s and at 440 s, as in the paper's figures 2 and 16."""

    rate: float  # of the whole fleet, outside of bursts
    burst_s: float = 60.0
    factor: float = 2.0
    begins: tuple[float, ...] = (45.0, 440.0)
    seconds: float = 640.0
    seed: int = 0

    def of(self, lengths: Lengths) -> list[TraceConversation]:
        steps, at = [], 0.0
        for begin in self.begins:
            steps.append(generators.RateStep(self.rate, begin - at))
            steps.append(generators.RateStep(self.rate * self.factor, self.burst_s))
            at = begin + self.burst_s
        steps.append(generators.RateStep(self.rate, max(1e-3, self.seconds - at)))
        times = generators.steps(steps, generators.stream(self.seed, "arrivals"))
        arriving = generators.arriving(lengths.draw(10_000_000, self.seed), times)
        return [*takewhile(lambda conversation: conversation.arrival_s < self.seconds, arriving)]


def p99_ttft(pressure: Pressure, dropping: DroppingSettings, fill: float, arrivals: Arrivals) -> float:
    """Return the P99 TTFT, in seconds, of long answers on the A800 cluster on the simulator's clock."""
    settings = SimulationSettings(
        SystemSettings(System.COLLOCATED),
        PlacerSettings(fill=fill, max_prefill_wait_s=float("inf")),
        pressure,
        park_after_s=30.0,
        reserved_until_held=True,
        dropping=dropping,
    )
    recorder = Simulation(A800.fleet(), settings).run(arrivals.of(LONG_ANSWERS)).recorder
    return percentile(np.asarray(recorder.turn_ttft), 99)
