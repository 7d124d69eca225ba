"""What goes wrong in the connector: the base of its exceptions, and why a transfer did not happen."""

from enum import StrEnum


class KVTransferError(Exception):
    """Base of the exceptions of this package."""


class ConnectorConfigError(KVTransferError, ValueError):
    """The connector's settings cannot be used; the message says which and why."""


class Reason(StrEnum):
    """Why a decoder recomputes a prompt instead of fetching its KV; counted."""

    UNAUTHORISED = "unauthorised"  # wrong or missing secret
    PROTOCOL = "protocol"  # the peer speaks something else
    OLD_EPOCH = "old_epoch"  # the producer was restarted since the transfer was planned
    MAPPING = "mapping"  # tensor-parallel sizes or ranks do not match
    LAYOUT = "layout"  # KV of another model, data type or block size
    PROMPT = "prompt"  # the two legs were given different prompts
    UNKNOWN = "unknown"  # no prefill with this id began in time
    ABORTED = "aborted"  # the prefill was aborted
    EXPIRED = "expired"  # the lease ran out
    TAKEN = "taken"  # the transfer was already delivered
    NO_CAPACITY = "no_capacity"  # no slot of a staging window in time
    STALLED = "stalled"  # the prefill or the peer made no progress in time
    SHORT = "short"  # fewer blocks than the prompt has
    CORRUPT = "corrupt"  # a tag did not match: changed on its way
    UNREACHABLE = "unreachable"  # no connection, or it broke
    CANCELLED = "cancelled"  # the decoder's request ended first
    INTERNAL = "internal"  # a defect of ours; the log has it
    INVALID = "invalid"  # the request's transfer parameters cannot be used


class TransferRefused(KVTransferError):
    """A transfer that will not happen, with the reason the other side is told."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
