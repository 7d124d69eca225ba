"""The KV cache groups of a model: layers that share a list of blocks, and what each keeps of a long prompt.

vLLM puts layers of one kind into groups. All groups take their blocks from one pool, and a block is one
group's at a time. Layers with full attention keep every block of a prompt; layers that attend to a window
keep the blocks of it, and what the window has left is given back. Without vLLM's hybrid manager, and for
models whose layers are all alike, there is one group.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int  # of one block, over the layers, on one rank
    window: int = 0  # tokens that a layer attends to; 0: all

    def first_block(self, tokens: int) -> int:
        """The first block that what follows so many tokens attends to."""
        return max(0, tokens - self.window + 1) // self.block_tokens if self.window else 0

    def first_kept(self, blocks: int) -> int:
        return self.first_block(blocks * self.block_tokens)


def block_bytes(groups: Iterable[CacheGroup]) -> int:
    """Of one block of the pool, on one rank: whichever group has it, it takes as much as the largest."""
    return max(group.block_bytes for group in groups)
