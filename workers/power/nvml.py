"""Access to power limits, power and energy of NVIDIA GPUs through nvidia-ml-py, in watts and joules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from workers.processes import WorkerError


class PowerError(WorkerError):
    """An operation on a GPU's power failed. The message says which operation, and why."""


class NoGpus(PowerError):
    """Error: the machine has no NVIDIA driver, or no GPU with the given index or UUID."""


class NotPermitted(PowerError):
    """Error: the process may not set a power limit, which needs root."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU with its power limit and the range of limits that it accepts, 0 W if the driver reports none."""

    uuid: str
    index: int
    name: str
    limit_w: float
    least_w: float
    most_w: float

    @property
    def takes_limits(self) -> bool:
        return self.most_w > 0.0

    @property
    def label(self) -> str:
        return f"{self.index} ({self.name})"


class Gpus:
    """Context in which NVML is open, for the GPUs of this machine."""

    def __init__(self) -> None:
        import pynvml  # imported here, because only processes with GPUs should load it

        self._nvml = pynvml

    def __enter__(self) -> "Gpus":
        with self._errors("opening NVML"):
            self._nvml.nvmlInit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._errors("closing NVML"):
            self._nvml.nvmlShutdown()

    def all(self) -> list[Gpu]:
        with self._errors("counting GPUs"):
            return [
                self._read(self._nvml.nvmlDeviceGetHandleByIndex(at))
                for at in range(self._nvml.nvmlDeviceGetCount())
            ]

    def find(self, name: str) -> Gpu:
        """Return the GPU with this index or UUID, as in `CUDA_VISIBLE_DEVICES`.

        An index is ambiguous: CUDA counts in another order than NVML unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
        """
        with self._errors(f"GPU {name}"):
            if name.isdigit():
                if int(name) >= self._nvml.nvmlDeviceGetCount():
                    raise NoGpus(f"GPU {name}: this machine has {self._nvml.nvmlDeviceGetCount()}")
                return self._read(self._nvml.nvmlDeviceGetHandleByIndex(int(name)))
            return self._read(self._handle(name))

    def set_limit(self, uuid: str, watts: float) -> None:
        with self._errors(f"setting {uuid} to {watts:g} W"):
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle(uuid), round(watts * 1000.0))

    def joules(self, uuid: str) -> float:
        """Return the energy that the GPU has used since the driver was loaded."""
        with self._errors(f"energy of {uuid}"):
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle(uuid))) / 1000.0

    def watts(self, uuid: str) -> float:
        with self._errors(f"power of {uuid}"):
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle(uuid))) / 1000.0

    def memory(self, uuid: str) -> int:
        """Return the bytes of the GPU's memory, 0 if it has no memory of its own."""
        with self._errors(f"memory of {uuid}"):
            found = self._supported(self._nvml.nvmlDeviceGetMemoryInfo, self._handle(uuid))
            return int(found.total) if found is not None else 0

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Return a context that turns NVML's errors into a PowerError, which names the operation `what`."""
        nvml = self._nvml
        try:
            yield
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NO_PERMISSION:
                raise NotPermitted(f"{what}: not permitted; setting power limits needs root") from error
            if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise NoGpus(f"{what}: there is no NVIDIA driver on this machine ({error})") from error
            if error.value == nvml.NVML_ERROR_NOT_FOUND:
                raise NoGpus(f"{what}: no such GPU") from error
            raise PowerError(f"{what}: {error}") from error

    def _handle(self, uuid: str) -> object:
        return self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode())

    def _read(self, handle: object) -> Gpu:
        now = self._supported(self._nvml.nvmlDeviceGetPowerManagementLimit, handle)
        accepted = self._supported(self._nvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
        least, most = accepted if now is not None and accepted is not None else (0, 0)
        return Gpu(
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            index=int(self._nvml.nvmlDeviceGetIndex(handle)),
            name=_text(self._nvml.nvmlDeviceGetName(handle)),
            limit_w=(now or 0) / 1000.0,
            least_w=least / 1000.0,
            most_w=most / 1000.0,
        )

    def _supported(self, read: Callable[[object], Any], handle: object) -> Any:
        """Return `read(handle)`, or None if the driver does not support it, as on some laptops."""
        try:
            return read(handle)
        except self._nvml.NVMLError_NotSupported:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
