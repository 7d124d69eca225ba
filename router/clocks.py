"""Clock of what ends in time: seconds since 1970 that no change of the system's clock moves.

It goes on with the time since the machine was booted. Stores keep its zero beside the times that are written
in them, so that who opens them next counts on. After another boot, or on another machine, it begins with what
the system's clock says, but not before the newest time in the store. Expiry dates that people wrote down (of
API keys) go by the system's clock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Zero:
    """When this boot began, by the clock that the store's times are of."""

    boot: str
    at: float


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # sleep of the machine included


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SteadyClock:
    def __init__(
        self,
        boot: Callable[[], str] = _boot,
        since_boot: Callable[[], float] = _since_boot,
        system: Callable[[], float] = time.time,
    ) -> None:
        self._since_boot, self._system = since_boot, system
        self.zero = Zero(boot(), system() - since_boot())

    def __call__(self) -> float:
        return self.zero.at + self._since_boot()

    def resume(self, kept: Zero | None, newest: float = 0.0) -> Zero:
        """Count on as the store that has this zero; what it is to keep now. `newest`: of its times."""
        if kept is not None and kept.boot == self.zero.boot:
            self.zero = kept
        else:
            self.zero = Zero(self.zero.boot, max(self._system(), newest) - self._since_boot())
        return self.zero
