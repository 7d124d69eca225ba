"""What the two halves of the transfer tell each other, once a step."""

from collections import Counter
from dataclasses import dataclass, field

from kvtransfer.transfer.client import Source


@dataclass(frozen=True, slots=True)
class Opened:
    """A prefill begins, or begins again after a preemption."""

    transfer_id: str
    blocks: list[int]
    total_tokens: int
    prompt: str  # digest


@dataclass(frozen=True, slots=True)
class Fetch:
    """A request waits for the rest of its prompt."""

    request_id: str
    source: Source
    skip: int
    blocks: list[int]


@dataclass(slots=True)
class TransferOrder:
    voided: list[str] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    extended: list[tuple[str, list[int]]] = field(default_factory=list)
    progress: list[tuple[str, int]] = field(default_factory=list)  # tokens in place after this step
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # requests
    dismissed: list[Source] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class TransferReport:
    """Exports whose blocks may be freed, with the number of ranks that say so."""

    released: Counter[str] = field(default_factory=Counter)

    def merge(self, other: "TransferReport") -> "TransferReport":
        return TransferReport(self.released + other.released)
