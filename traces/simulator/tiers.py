"""Defines tiers of simulated engines, with their speed, memory, power and links."""

from dataclasses import dataclass, replace

from placement.engines import Role
from placement.overload.drop_plan import EngineShape
from placement.scheduling.latency_model import LatencyModel
from placement.scheduling.prefill_curve import prompt_seconds
from placement.sizing.power_curve import PowerCurve
from traces import TraceError


@dataclass(frozen=True, slots=True)
class EngineProfile:
    latency: LatencyModel
    power: PowerCurve
    chunk_tokens: int  # most new tokens of one iteration
    kv_tokens: int
    kv_bytes_per_token: float
    network_bytes_per_s: float
    host_bytes_per_s: float  # accelerator to host memory and back
    max_turns: int = 256  # vLLM's max_num_seqs
    # Needed to drop parameters; with 0 no parameters can be dropped.
    layers: int = 0
    layer_bytes: float = 0.0  # parameters of a layer
    activation_bytes: float = 0.0  # bytes of one token's activation between two layers

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token <= 0:
            raise TraceError(f"kv_bytes_per_token must be above 0, not {self.kv_bytes_per_token:g}")

    @property
    def shape(self) -> EngineShape | None:
        if not self.layers:
            return None
        return EngineShape(
            *(self.layers, self.layer_bytes, self.kv_tokens, self.kv_bytes_per_token, self.activation_bytes),
            *(self.network_bytes_per_s, self.latency),
        )

    def capped(self, watts: float) -> "EngineProfile":
        """Return the profile under a power cap, which slows computing but not reads of KV and weights."""
        slower = 1.0 / self.power.compute_speed(watts)
        latency = replace(
            self.latency,
            per_token=self.latency.per_token * slower,
            per_attended=self.latency.per_attended * slower,
            per_before=self.latency.per_before * slower,
        )
        return replace(self, latency=latency, power=self.power.capped(watts))


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    name: str
    role: Role
    replicas: int
    profile: EngineProfile


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    tiers: tuple[SimulatedTier, ...]


def prefill_seconds(profile: EngineProfile, prompt: int, cached: int = 0) -> float:
    return prompt_seconds(profile.latency, profile.chunk_tokens, prompt, cached)
