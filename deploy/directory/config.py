"""Configuration of the directory's process, which its actor writes to a JSON file."""

from dataclasses import dataclass

import msgspec

from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.prefill_curve import PrefillCurve
from router.directory.directory import DirectorySettings


@dataclass(frozen=True, slots=True)
class HostedDirectoryConfig:
    settings: DirectorySettings
    placer: PlacerSettings
    curves: dict[str, PrefillCurve]  # by tier
    alike: dict[str, str]  # tier -> a name of its hardware
    journal: str
    keepers: str  # file with the control address of each engine's keeper
    host: str
    port: int
    secret: str  # secret that gateways send
    keepers_key: str
    lease_s: float  # an engine whose keeper is away for longer counts as gone unless it still listens

    def dump(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def load(cls, content: bytes) -> "HostedDirectoryConfig":
        return msgspec.json.decode(content, type=cls)
