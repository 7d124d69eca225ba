"""The lanes of a fetch: connections over which one prompt's layers come at the same time.

Over one connection a piece is gathered, then tagged, then sent, each while the others wait, and no connection
is faster than the one thread in the system that copies its bytes. Lanes share nothing but the export: each
has a handshake, keys, an order of frames and an END of its own.
"""

from collections.abc import Sequence

LANES = 4  # at most
LANE_BYTES = 32 << 20  # at least: a handshake and a thread take as long as a few MiB


def shared_out(layer_bytes: Sequence[int]) -> list[list[int]]:
    """Layers by lane, each to the one that has least. Those of which most is wanted first: only they go on
    with every chunk of the prompt. A lane of others (windows, states) would be silent until the end."""
    most = max(layer_bytes, default=0)
    full = [layer for layer, size in enumerate(layer_bytes) if size == most]
    others = [layer for layer, size in enumerate(layer_bytes) if size < most]
    lanes = max(1, min(LANES, len(full), sum(layer_bytes) // LANE_BYTES))
    shares: list[list[int]] = [[] for _ in range(lanes)]
    loads = [0] * lanes
    for layer in (*full, *others):
        least = loads.index(min(loads))
        shares[least].append(layer)
        loads[least] += layer_bytes[layer]
    return [sorted(share) for share in shares]
