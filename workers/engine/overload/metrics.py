"""Metrics of engines that can drop layers."""

from kvtransfer.metrics import CounterSpec, HistogramSpec
from workers.engine.overload.orders import SplitEvent

COUNTERS = {
    "splits": CounterSpec(
        "conserve_splits",
        "Drops and restores of layers, by how they ended. lost: a peer failed, requests were computed again.",
        "outcome",
        tuple(event for event in SplitEvent if event is not SplitEvent.READY),
    ),
    "split_batches": CounterSpec(
        "conserve_split_batches",
        "Batches through layers of several engines. own: sent to peers; peer: computed here for a peer.",
        "whose",
        ("own", "peer"),
    ),
    "split_peer_seconds": CounterSpec(
        "conserve_split_peer_seconds",
        "Time that own batches spent at peers: in transit, waiting for their turn, and computed.",
    ),
    "split_idle_seconds": CounterSpec(
        "conserve_split_idle_seconds",
        "Time that own batches spent at peers while nothing was computed here: the pipeline's bubble.",
    ),
    "split_served_seconds": CounterSpec(
        "conserve_split_served_seconds", "Time that batches of peers were computed here."
    ),
    "split_forgotten_blocks": CounterSpec(
        "conserve_split_forgotten_blocks",
        "Blocks that only the prefix cache held and that a drop or a restore evicted, because moving them "
        "would have taken the link more than a second.",
    ),
    "split_exchanged_bytes": CounterSpec(
        "conserve_split_exchanged_bytes",
        "Bytes of KV that moved to peers or back while the engine stood still, without the first message to "
        "each peer, which also waits for the peer.",
    ),
    "split_exchange_seconds": CounterSpec(
        "conserve_split_exchange_seconds",
        "Time that conserve_split_exchanged_bytes took. Their ratio is the link's rate, with which the next "
        "drop is planned.",
    ),
    "split_peer_bytes": CounterSpec("conserve_split_peer_bytes", "Bytes of own batches sent to peers."),
}
_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
HISTOGRAMS = {
    "drop_seconds": HistogramSpec(
        "conserve_split_drop_seconds", "Time that an engine stood still for a drop.", _BUCKETS
    ),
    "restore_seconds": HistogramSpec(
        "conserve_split_restore_seconds",
        "Time that an engine stood still to restore its layers, also after the loss of a peer.",
        _BUCKETS,
    ),
}
