"""Machine with simulated GPUs: a stand-in for NVML's library, its state, and processes that see both."""

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LAYOUT = struct.Struct("96s8IQ")
ENERGY = struct.Struct("Q")  # `energy_mj`, the last field
DRAW_EVERY_S = 0.5
FIELDS = (
    "limit_mw",
    "least_mw",
    "most_mw",
    "default_mw",
    "power_mw",
    "fails",
    "sets",
    "reserved",
    "energy_mj",
)
PERMISSION, LOST, NO_ENERGY, DRIVER, IGNORES_LIMIT, NO_LIMITS, NO_MEMORY = 1, 2, 4, 8, 16, 32, 64


def build(folder: Path) -> Path:
    """Compile the library where the loader looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-O1", "-o", str(out), str(HERE / "stand_in.c")]
    subprocess.run(command, check=True, timeout=60)
    return folder


@dataclass(frozen=True)
class GpuMachine:
    library: Path
    state: Path
    home: Path

    @classmethod
    def of(cls, library: Path, folder: Path, gpus: int = 2) -> "GpuMachine":
        machine = cls(library, folder / "gpus", folder / "home")
        with machine.state.open("wb") as file:
            for index in range(gpus):
                numbers = (300_000, 100_000, 300_000, 300_000, 75_000, 0, 0, 0, 1_000_000)
                file.write(LAYOUT.pack(f"GPU-{index:08d}".encode(), *numbers))
        return machine

    @property
    def record(self) -> Path:
        return self.home / "power.json"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment in which a process sees the simulated GPUs."""
        paths = os.pathsep.join(filter(None, (str(self.library), os.environ.get("LD_LIBRARY_PATH", ""))))
        return {"LD_LIBRARY_PATH": paths, "STAND_IN_GPUS": str(self.state)}

    @property
    def env(self) -> dict[str, str]:
        here = {"PYTHONPATH": str(ROOT), "CONSERVE_HOME": str(self.home)}
        return {**os.environ, **self.variables, **here}

    def read(self, index: int, field: str) -> int:
        values = LAYOUT.unpack_from(self.state.read_bytes(), index * LAYOUT.size)
        return int(values[1 + FIELDS.index(field)])

    def write(self, index: int, field: str, value: int) -> None:
        values = list(LAYOUT.unpack_from(self.state.read_bytes(), index * LAYOUT.size))
        values[1 + FIELDS.index(field)] = value
        with self.state.open("r+b") as file:  # the same file: a running process has it mapped
            file.seek(index * LAYOUT.size)
            file.write(LAYOUT.pack(*values))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let every GPU's energy counter grow with its power until the block ends."""
        stop = threading.Event()
        thread = threading.Thread(target=self._draw, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _draw(self, stop: threading.Event) -> None:
        with self.state.open("r+b", buffering=0) as file:
            while not stop.wait(DRAW_EVERY_S):
                for index in range(len(self.limits())):
                    drawn = int(self.read(index, "power_mw") * DRAW_EVERY_S)
                    # Write only the counter, because another process may be setting the limit.
                    file.seek((index + 1) * LAYOUT.size - ENERGY.size)
                    file.write(ENERGY.pack(self.read(index, "energy_mj") + drawn))

    def limits(self) -> list[float]:
        count = self.state.stat().st_size // LAYOUT.size
        return [self.read(index, "limit_mw") / 1000.0 for index in range(count)]

    def python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=30, cwd=ROOT, check=False
        )

    def start(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", code, *arguments]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True, cwd=ROOT)
