"""Keys and values that stay on the rank that read them: where they are, and attention of new tokens to all of them.

    pages    which tokens of which sequence are in which block of this rank's memory, the same for all layers
    slabs    the memory, a tensor a layer for some blocks
    store    sequences side by side, and one layer's view of them
    plan     where a step finds the keys it reads
    decode   one token of each sequence: partial results of all ranks, merged by their lse in one exchange
    chosen   one token of each sequence over the keys that it has chosen; where these are, `whereabouts` knows
    read     more tokens under a layout: queries go from rank to rank, keys stay

docs/developers/sharded_keys.md says why.
"""

from .chosen import decode_blocks, decode_index
from .decode import decode_attention, decode_latents
from .read import read_attention, read_latents, with_earlier, with_earlier_latents
from .slabs import KeySize
from .store import KeyRows, KeyStore, LayerKeys, rows_of, with_rows

__all__ = [
    "KeyRows",
    "KeySize",
    "KeyStore",
    "LayerKeys",
    "decode_attention",
    "decode_blocks",
    "decode_index",
    "decode_latents",
    "read_attention",
    "read_latents",
    "rows_of",
    "with_earlier",
    "with_earlier_latents",
    "with_rows",
]
