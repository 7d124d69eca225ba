"""Measured latency models on disk: one JSON file, keyed by model, hardware and vLLM version."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from placement.iteration.latency import LatencyModel, RegionError
from workers.processes import WorkerError, write_atomically


@dataclass(frozen=True, slots=True)
class ProfileKey:
    model: str
    hardware: str
    vllm: str

    def __str__(self) -> str:
        return f"{self.model} | {self.hardware} | vllm {self.vllm}"


@dataclass(frozen=True, slots=True)
class Profile:
    model: LatencyModel
    errors: tuple[RegionError, ...]
    layer_seconds: float  # time of one layer in the largest batch measured: what a safepoint's distance costs
    measured_at: float  # seconds since the epoch


class ProfileStoreError(WorkerError):
    """The profile file cannot be used as it is."""


class ProfileStore:
    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, key: ProfileKey) -> Profile | None:
        entry = self._read().get(str(key))
        if entry is None:
            return None
        try:
            return Profile(
                LatencyModel(**entry["model"]),
                tuple(RegionError(**error) for error in entry["errors"]),
                float(entry["layer_seconds"]),
                float(entry["measured_at"]),
            )
        except (KeyError, TypeError, ValueError) as wrong:
            raise ProfileStoreError(
                f"the profile of {key} in {self._path} is damaged ({wrong}); run `conserve profile` again"
            ) from wrong

    def save(self, key: ProfileKey, profile: Profile) -> None:
        entries = self._read()
        entries[str(key)] = asdict(profile)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(entries, indent=1, sort_keys=True))

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
