"""Counters of the connector, which vLLM's front end serves at the engine's `/metrics`.

The plugins count in the scheduler's and the workers' processes under short names; `connector_stats.py` brings
the counts to the front end and adds vLLM's labels (model, engine).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Reason why a decoder computes a prompt instead of fetching its KV."""

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
    CORRUPT = "corrupt"  # a tag did not match: bytes changed on their way
    UNREACHABLE = "unreachable"  # no connection, or it broke
    CANCELLED = "cancelled"  # the decoder's request ended first
    INTERNAL = "internal"  # a defect in this package; see the log
    INVALID = "invalid"  # the request's transfer parameters cannot be used


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """Name and help of one Prometheus counter."""

    name: str
    help: str
    label: str = ""  # short names are then "key.value"
    values: tuple[str, ...] = ()  # values of the label, shown from the start


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """Name, help and buckets of one Prometheus histogram."""

    name: str
    help: str
    buckets: tuple[float, ...]


COUNTERS: Mapping[str, CounterSpec] = {
    "transfers": CounterSpec("conserve_kv_transfers", "Prompts whose KV was fetched and verified."),
    "transfer_bytes": CounterSpec("conserve_kv_transfer_bytes", "Bytes of KV fetched and verified."),
    "transfer_seconds": CounterSpec(
        "conserve_kv_transfer_seconds", "Time of fetches, from asking to the last block."
    ),
    "refused": CounterSpec(
        "conserve_kv_transfers_refused",
        "Transfers that did not happen, by reason; the prompt is computed on the decoder instead.",
        "reason",
        tuple(Reason),
    ),
    "stored_blocks": CounterSpec("conserve_kv_stored_blocks", "Blocks copied to host memory."),
    "restored_blocks": CounterSpec("conserve_kv_restored_blocks", "Blocks copied back from host memory."),
    "disk_blocks": CounterSpec("conserve_kv_disk_blocks", "Blocks moved from host memory to the disk."),
    "disk_restored_blocks": CounterSpec(
        "conserve_kv_disk_restored_blocks",
        "Blocks copied back from the disk for turns.",
    ),
    "failed_disk_moves": CounterSpec(
        "conserve_kv_failed_disk_moves",
        "Blocks that could not be written to the disk, which is failing or was not available at the start; "
        "the engine's log has the reason. 0 is right.",
    ),
    "restores": CounterSpec("conserve_kv_restores", "Turns that got blocks back from host memory."),
    "corrupt_blocks": CounterSpec(
        "conserve_kv_corrupt_host_blocks", "Host blocks that failed their check; they are computed again."
    ),
    "failed_copies": CounterSpec(
        "conserve_kv_failed_copies",
        "Blocks whose copy to or from host memory raised; the engine's log has it. 0 is right.",
    ),
    "unregistered_chunks": CounterSpec(
        "conserve_kv_unregistered_host_chunks",
        "Chunks of host memory that the GPU's driver did not register: copies to and from them are slower; "
        "the engine's log has why. 0 is right.",
    ),
    "piecewise_only": CounterSpec(
        "conserve_kv_piecewise_only",
        "Ranks where all steps have piecewise CUDA graphs, because vLLM could not be told which of them need "
        "it; the engine's log has why. 0 is right.",
    ),
    "graphs_taken_back": CounterSpec(
        "conserve_kv_graphs_taken_back",
        "Steps with work between their layers for which vLLM chose a whole CUDA graph all the same: they ran "
        "without graphs; the engine's log has it. 0 is right.",
    ),
    "host_full": CounterSpec("conserve_kv_host_full", "Times a block found no free slot in host memory."),
    "left_host": CounterSpec("conserve_kv_left_host", "Conversations whose host memory was given to others."),
    "parked": CounterSpec(
        "conserve_kv_parked",
        "Conversations parked, by cause; late: brought back ahead, and the turn did not come.",
        "cause",
        ("idle", "said", "pressure", "late"),
    ),
    "ended": CounterSpec(
        "conserve_kv_ended",
        "Conversations forgotten here, by cause.",
        "cause",
        ("released", "ttl", "drained"),
    ),
    "faults": CounterSpec("conserve_kv_faults", "Faults found by the idle integrity check; 0 is right."),
    "prompt_tokens": CounterSpec(
        "conserve_prompt_tokens", "Tokens of turns' prompts computed, before their first tokens."
    ),
    "prompt_seconds": CounterSpec(
        "conserve_prompt_seconds",
        "Time of iterations with prompts of turns in them: conserve_prompt_tokens over this is the rate that "
        "the placer goes by.",
    ),
    "prompts_unplanned": CounterSpec(
        "conserve_prompts_unplanned_iterations",
        "Steps of planning that failed on an engine without co-serving: vLLM's own schedule held for their "
        "iteration; the log has it. 0 is right.",
    ),
    "failed_blocks": CounterSpec(
        "conserve_kv_failed_blocks", "Blocks a load did not fill; they are evicted and computed."
    ),
}
