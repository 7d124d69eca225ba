"""What goes wrong between two engines that share their layers."""

from workers.processes import WorkerError


class OverloadConfigError(WorkerError, ValueError):
    """This engine cannot drop parameters; the message says why and what to do."""


class PeerError(WorkerError, ConnectionError):
    """The peer is gone, late, or in another state than it must be: both engines have whole models again."""


class PeerRefused(PeerError):
    """The peer answered, and does not do it: it has not come so far."""


class SplitOver(PeerError):
    """The peer answered, and has left this epoch, or was never in it."""


class PageError(WorkerError, MemoryError):
    """Physical memory could not be mapped, unmapped, or had; says which call, and the system's own words."""


class RowsUnmapped(PageError):
    """Rows of KV that have no memory at present were named."""
