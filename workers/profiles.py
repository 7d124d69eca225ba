"""Store of measured latency models in a JSON file, keyed by everything that iteration times depend on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from placement.scheduling.latency_model import LatencyModel, RegionError
from workers.processes import WorkerError, write_atomically


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything that iteration times depend on."""

    model: str
    dtype: str
    hardware: str
    tensor: int  # ranks that share a layer
    pipeline: int
    power_cap_w: float | None
    graphs: str
    vllm: str

    def __str__(self) -> str:
        cap = "no cap" if self.power_cap_w is None else f"{self.power_cap_w:g} W"
        ranks = f"TP {self.tensor} | PP {self.pipeline}"
        what = (self.model, self.dtype, self.hardware, ranks, cap, self.graphs, f"vllm {self.vllm}")
        return " | ".join(what)


Coefficients = Mapping[str, float]  # of a LatencyModel


@dataclass(frozen=True, slots=True)
class StartingKnowledge:
    """Measurements that an engine receives at its start.

    They are not part of the engine's fingerprint, so that a keeper with newer measurements can adopt it.
    """

    profiles: Mapping[str, Coefficients] = field(default_factory=dict)  # the fleet's profiles, by key
    power_cap_w: float | None = None  # power cap of this engine's GPUs


@dataclass(frozen=True, slots=True)
class Profile:
    model: LatencyModel
    errors: tuple[RegionError, ...]
    layer_seconds: float  # time of one layer in the largest measured batch: the wait for a safepoint
    measured_at: float  # seconds since the epoch


class ProfileStoreError(WorkerError):
    """Error: the file of profiles is damaged."""


class ProfileStore:
    def __init__(self, path: Path) -> None:
        self._path = path

    def coefficients(self) -> dict[str, Coefficients]:
        """Return the coefficients of all stored models, by the text of their keys."""
        entries = self._read()
        try:
            return {key: asdict(LatencyModel(**entry["model"])) for key, entry in entries.items()}
        except (KeyError, TypeError, ValueError) as wrong:
            raise ProfileStoreError(
                f"{self._path} is damaged ({wrong}); run `conserve profile` again"
            ) from wrong

    def save(self, key: ProfileKey, profile: Profile) -> None:
        entries = self._read()
        entries[str(key)] = asdict(profile)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(entries, indent=1, sort_keys=True))

    def measured_at(self, key: ProfileKey) -> float | None:
        """Return when the profile of `key` was measured, or None if it is not stored or has no time."""
        entry = self._read().get(str(key))
        at = entry.get("measured_at") if isinstance(entry, dict) else None
        return at if isinstance(at, int | float) else None

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        try:
            entries = json.loads(self._path.read_text())
        except ValueError as wrong:
            raise ProfileStoreError(f"{self._path} is not JSON ({wrong}); remove it or restore it") from wrong
        if not isinstance(entries, dict):
            raise ProfileStoreError(f"{self._path} does not hold profiles; remove it")
        return entries
