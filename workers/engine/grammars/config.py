"""Budget for compiling a grammar, and the environment variables that carry it to an engine's processes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

# Environment variables: the budget as JSON, and the address of the compiling process.
BUDGET, ADDRESS = "CONSERVE_GRAMMAR_BUDGET", "CONSERVE_GRAMMAR_PROCESS"

MIB = 1 << 20
# Niceness of a slow fork, and of the engine core's compilations, which are known to be within the budget.
LONG_FORK_NICE, ENGINE_CORE_NICE = 19, 10
_WALL_FACTOR = 6  # by which a compilation may take longer on a busy machine


@dataclass(frozen=True, slots=True)
class GrammarBudget:
    """Budget of one compilation; a request whose grammar exceeds it is refused."""

    cpu_s: float = 5.0  # limit for all threads together
    memory_mib: int = 256
    at_once: int = 2  # compilations of different owners that an engine runs at the same time
    wait_s: float = 30.0  # longest wait for other compilations

    @property
    def wall_s(self) -> float:
        return self.cpu_s * _WALL_FACTOR

    @property
    def sentence(self) -> str:
        return f"{self.cpu_s:g} s of computing or {self.memory_mib} MiB of memory"

    def to_environment(self) -> dict[str, str]:
        return {BUDGET: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "GrammarBudget":
        return cls(**json.loads(environ.get(BUDGET, "{}")))
