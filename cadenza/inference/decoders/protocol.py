"""What the engine needs of a model: keys and values into a cache, logits of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from cadenza.inference.kv_cache import KVCache, KVShape, RowBlock
from cadenza.inference.replica import Tokens


class PrefillSegment(NamedTuple):
    """Tokens of a prompt that are not in the cache yet."""

    row: int
    start: int
    """Position of the first one."""
    tokens: Tokens


class Decoder(Protocol):
    """A causal language model over a KV cache."""

    shape: KVShape
    vocab: int
    max_positions: int

    def pack(self, module: nn.Module) -> object:
        """The weights of this module as `load` takes them: a copy that is never written to. It may run beside steps."""
        ...

    def load(self, packed: object) -> None:
        """Use what `pack` made, here or in a decoder of the same model. It costs nothing."""
        ...

    def clone(self) -> Decoder:
        """Another decoder with the same weights and memory of its own."""
        ...

    def prefill(self, segments: Sequence[PrefillSegment], cache: KVCache) -> None:
        """Put the keys and values of these tokens into their rows."""
        ...

    def decode(
        self, ids: Tensor, positions: Tensor, cache_indices: Tensor, row_blocks: Sequence[RowBlock], cache: KVCache
    ) -> Tensor:
        """Logits [n, V], float32, after token `ids[r]` at `positions[r]` of row r, at `cache_indices` of the cache."""
        ...
