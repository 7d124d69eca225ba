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
    PROTOCOL = "protocol"  # the peer sent something that the protocol does not allow
    OLD_EPOCH = "old_epoch"  # the producer was restarted since the transfer was planned
    MAPPING = "mapping"  # tensor-parallel sizes or ranks do not match
    LAYOUT = "layout"  # KV of another model, data type or block size
    PROMPT = "prompt"  # the two legs were given different prompts
    UNKNOWN = "unknown"  # no prefill with this id began in time
    ABORTED = "aborted"  # the prefill was aborted
    EXPIRED = "expired"  # the lease ran out
    TAKEN = "taken"  # the transfer was already delivered
    NO_CAPACITY = "no_capacity"  # no slot of the staging window became free in time
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
    label: str = ""  # if set, counts have the short names "key.value"
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
    "restores": CounterSpec(
        "conserve_kv_restores", "Turns and prefetches that got blocks back from host memory."
    ),
    "corrupt_blocks": CounterSpec(
        "conserve_kv_corrupt_host_blocks", "Host blocks that failed their check; they are computed again."
    ),
    "failed_copies": CounterSpec(
        "conserve_kv_failed_copies",
        "Blocks whose copy to or from host memory failed; the engine's log has the error. 0 is right.",
    ),
    "unregistered_chunks": CounterSpec(
        "conserve_kv_unregistered_host_chunks",
        "Chunks of host memory that the GPU's driver did not register: copies to and from them are slower; "
        "the engine's log has the reason. 0 is right.",
    ),
    "piecewise_only": CounterSpec(
        "conserve_kv_piecewise_only",
        "Ranks where all steps have piecewise CUDA graphs, because vLLM could not be told which steps need "
        "them; the engine's log has the reason. 0 is right.",
    ),
    "graphs_taken_back": CounterSpec(
        "conserve_kv_graphs_taken_back",
        "Steps that ran without CUDA graphs because they had work between layers and vLLM chose a whole "
        "graph; the engine's log says what to set. 0 is right.",
    ),
    "host_full": CounterSpec("conserve_kv_host_full", "Times a block found no free slot in host memory."),
    "left_host": CounterSpec("conserve_kv_left_host", "Conversations whose host memory was given to others."),
    "parked": CounterSpec(
        "conserve_kv_parked",
        "Conversations parked, by cause; late: the KV was prefetched, and the turn did not come in time.",
        "cause",
        ("idle", "said", "pressure", "late"),
    ),
    "ended": CounterSpec(
        "conserve_kv_ended",
        "Conversations that the engine forgot, by cause.",
        "cause",
        ("released", "ttl", "drained"),
    ),
    "faults": CounterSpec("conserve_kv_faults", "Faults found by the idle integrity check; 0 is right."),
    "prompt_tokens": CounterSpec(
        "conserve_prompt_tokens", "Prompt tokens that turns computed before their first token."
    ),
    "prompt_seconds": CounterSpec(
        "conserve_prompt_seconds",
        "Time of iterations that computed prompts of turns. conserve_prompt_tokens divided by it is the rate "
        "that the placer uses.",
    ),
    "prompts_unplanned": CounterSpec(
        "conserve_prompts_unplanned_iterations",
        "Iterations that an engine without co-serving failed to plan and scheduled as plain vLLM does; the "
        "engine's log has the error. 0 is right.",
    ),
    "failed_blocks": CounterSpec(
        "conserve_kv_failed_blocks", "Blocks a load did not fill; they are evicted and computed."
    ),
}
