"""Decode layers of Qwen3-8B's sizes, as one CUDA graph or as graph pieces with attention between them.

vLLM launches a step in one of these two ways. Between graph pieces, four operations run here without a graph:
keys and values are written, attention is computed, and its output is copied. vLLM's own calls cost more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

LayerHook = Callable[[int], object]


@dataclass(frozen=True)
class LayerSizes:
    layers: int
    batch: int
    hidden: int
    kv_heads: int
    group: int  # query heads of a KV head
    channels: int
    intermediate: int
    context: int


QWEN3_8B = LayerSizes(36, 16, 4096, 8, 4, 128, 12288, 512)
SMALL = LayerSizes(8, 1, 16, 2, 2, 8, 16, 4)


def no_hook(layer: int) -> None:
    """Do nothing before or after a layer."""


class DecodeLayers:
    def __init__(self, device: str, whole: bool = True) -> None:
        self._on_gpu = device == "cuda"
        sizes = self.sizes = QWEN3_8B if self._on_gpu else SMALL
        self.layers = sizes.layers
        if self._on_gpu:
            torch.backends.cuda.enable_cudnn_sdp(False)  # its first call compiles
        else:
            torch.set_num_threads(1)  # layers are tiny: threads would only wait for one another
        torch.manual_seed(0)

        def weights(rows: int, columns: int) -> list[torch.Tensor]:
            return [self._random(device, rows, columns, scale=rows**-0.5) for _ in range(sizes.layers)]

        kv_width = sizes.kv_heads * sizes.channels
        self._q_width = kv_width * sizes.group
        self._qkv_weights = weights(sizes.hidden, self._q_width + 2 * kv_width)
        self._out_weights = weights(self._q_width, sizes.hidden)
        self._up_weights = weights(sizes.hidden, 2 * sizes.intermediate)
        self._down_weights = weights(sizes.intermediate, sizes.hidden)
        cache = sizes.batch, sizes.kv_heads, sizes.context, sizes.channels
        self._keys, self._values = (
            [self._random(device, *cache) for _ in range(sizes.layers)] for _ in range(2)
        )
        self._new_keys, self._new_values = (
            [layer[:, :, -1] for layer in kept] for kept in (self._keys, self._values)
        )
        self._asked = self._random(device, sizes.batch, sizes.hidden)
        self.hidden = torch.empty_like(self._asked)
        self._qkv = self._random(device, sizes.batch, self._q_width + 2 * kv_width)
        queries, keys, values = self._qkv.split([self._q_width, kv_width, kv_width], dim=1)
        self._query = queries.view(sizes.batch, sizes.kv_heads, sizes.group, sizes.channels)
        self._key, self._value = (
            one.view(sizes.batch, sizes.kv_heads, sizes.channels) for one in (keys, values)
        )
        self._attended = torch.empty(self._query.shape, dtype=self._qkv.dtype, device=device)
        self._whole: Callable[[], None] = self._everything
        self._begin: Callable[[], None] = self._before_attention
        self._pieces: list[Callable[[], None]] = [self._after_attention(n) for n in range(sizes.layers)]
        if self._on_gpu:
            self._everything()  # kernels are loaded before they are captured
            self.finish()
            pool = torch.cuda.graph_pool_handle()
            if whole:
                self._whole = _captured(self._everything, pool)
            self._begin = _captured(self._begin, pool)
            self._pieces = [_captured(piece, pool) for piece in self._pieces]

    def step_as_whole_graph(self) -> None:
        self._whole()

    def step_in_pieces(self, before: LayerHook = no_hook, after: LayerHook = no_hook) -> None:
        self._begin()
        for layer, piece in enumerate(self._pieces):
            before(layer)
            self.attention(layer)
            after(layer)
            piece()

    def attention(self, layer: int) -> None:
        self._new_keys[layer].copy_(self._key)
        self._new_values[layer].copy_(self._value)
        given = functional.scaled_dot_product_attention(self._query, self._keys[layer], self._values[layer])
        self._attended.copy_(given)

    def finish(self) -> None:
        """Wait until all work on this thread's stream is done; do not wait for other streams."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def _before_attention(self) -> None:
        self.hidden.copy_(self._asked)
        self._project(0)

    def _after_attention(self, layer: int) -> Callable[[], None]:
        """Return a function that does the work between the attention of `layer` and of the next layer."""
        following = (layer + 1) % self.sizes.layers

        def work() -> None:
            attended = self._attended.view(self.sizes.batch, self._q_width)
            self.hidden.add_(torch.mm(attended, self._out_weights[layer]))
            gate, up = torch.mm(self._normed(), self._up_weights[layer]).chunk(2, dim=1)
            self.hidden.add_(torch.mm(functional.silu(gate) * up, self._down_weights[layer]))
            self._project(following)

        return work

    def _project(self, layer: int) -> None:
        torch.mm(self._normed(), self._qkv_weights[layer], out=self._qkv)

    def _normed(self) -> torch.Tensor:
        return functional.rms_norm(self.hidden, (self.sizes.hidden,))

    def _everything(self) -> None:
        self._before_attention()
        for layer in range(self.sizes.layers):
            self.attention(layer)
            self._after_attention(layer)()

    def _random(self, device: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        dtype = torch.bfloat16 if self._on_gpu else torch.float32
        return torch.randn(*shape, dtype=dtype, device=device) * scale


def _captured(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
