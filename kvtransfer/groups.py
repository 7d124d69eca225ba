"""The KV cache groups of a model: layers that share a list of blocks, and what each keeps of a long prompt.

vLLM puts layers of one kind into groups. All groups take their blocks from one pool, and a block is one
group's at a time. Layers with full attention keep every block of a prompt; layers that attend to a window
keep the blocks of it, and what the window has left is given back. Layers with a state (linear attention,
state spaces) have one block that counts: it holds what the prompt has come to at the block's end. Without
vLLM's hybrid manager, and for models whose layers are all alike, there is one group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STATE_WINDOW = 2  # a state stands in the block of the token before: as of a window of that and the next


@dataclass(frozen=True, slots=True)
class CacheGroup:
    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int  # of one block, over the layers, on one rank
    window: int = 0  # tokens that a layer attends to; 0: all
    state: bool = False

    def first_block(self, tokens: int) -> int:
        """The first block that what follows so many tokens attends to."""
        return max(0, tokens - self.window + 1) // self.block_tokens if self.window else 0

    def first_kept(self, blocks: int) -> int:
        return self.first_block(blocks * self.block_tokens)


def block_bytes(groups: Iterable[CacheGroup]) -> int:
    """Of one block of the pool, on one rank: whichever group has it, it takes as much as the largest."""
    return max(group.block_bytes for group in groups)


def beside_tokens(groups: Sequence[CacheGroup]) -> int:
    """What a conversation that runs takes of the pool for windows and states, in tokens of blocks. Of a state
    it has the one at the last block's end and the one that changes."""
    blocks = (2 if one.state else -(-one.window // one.block_tokens) + 1 for one in groups if one.window)
    return sum(blocks) * groups[0].block_tokens


def transferred_tokens(groups: Sequence[CacheGroup], prompt: int) -> int:
    """How many tokens of a prompt come from a prefiller.

    vLLM computes the last again, having made room for what the token after it attends to: where that leaves
    out a block, room is made for one token less. A state is not what it was a token before: the last that
    vLLM keeps is at the end of a block, and what is behind it is computed.
    """
    if any(group.state for group in groups):
        block = groups[0].block_tokens
        return (prompt - 1) // block * block
    shorter = any(group.first_block(prompt - 1) < group.first_block(prompt) for group in groups)
    return prompt - 1 if shorter else prompt
