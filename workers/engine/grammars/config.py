"""Budget of one compilation, and how the processes of an engine find the one that compiles."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

BUDGET = "CONSERVE_GRAMMAR_BUDGET"  # environment of an engine's processes
ADDRESS = "CONSERVE_GRAMMAR_PROCESS"

MIB = 1 << 20
# Niceness: a fork that takes long has what engines leave; what the engine core compiles is known to be small.
LONG_FORK_NICE, ENGINE_CORE_NICE = 19, 10
_WALL_FACTOR = 6  # a machine whose cores are all taken computes so much slower


@dataclass(frozen=True, slots=True)
class GrammarBudget:
    """Budget of one compilation; a request whose grammar is over it is refused."""

    cpu_s: float = 5.0  # of all threads together
    memory_mib: int = 256
    at_once: int = 2  # of an engine; of one owner one
    wait_s: float = 30.0  # for others' compilations

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
