"""What a simulated fleet is made of: how fast its engines are, what they hold, what they draw."""

from dataclasses import dataclass, replace

from placement.engines import Role
from placement.latency import LatencyModel
from placement.power import PowerCurve


@dataclass(frozen=True, slots=True)
class EngineProfile:
    latency: LatencyModel
    power: PowerCurve
    chunk_tokens: int  # most new tokens of one iteration
    kv_tokens: int
    kv_bytes_per_token: float
    network_bytes_per_s: float
    host_bytes_per_s: float  # accelerator to host memory and back

    def capped(self, watts: float) -> "EngineProfile":
        """Under a power cap the terms that compute slow down; reading KV and weights keeps its pace."""
        slower = 1.0 / self.power.compute_speed(watts)
        latency = replace(
            self.latency,
            per_token=self.latency.per_token * slower,
            per_attended=self.latency.per_attended * slower,
            per_before=self.latency.per_before * slower,
        )
        return replace(self, latency=latency, power=self.power.capped(watts))


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    role: Role
    replicas: int
    profile: EngineProfile


@dataclass(frozen=True, slots=True)
class Fleet:
    tiers: tuple[Tier, ...]

    def of(self, role: Role) -> tuple[Tier, ...]:
        return tuple(tier for tier in self.tiers if tier.role is role)
